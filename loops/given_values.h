// Checks values that a program gives by name before anything is changed.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "dsengine/comm.h"
#include "dsengine/fully_shard.h"

namespace ds::loops {

using ValuesByName = std::map<std::string, at::Tensor>;

// The values by their names. This and the functions below throw UsageError, as `call`; here for a name that comes
// twice.
ValuesByName by_name(const char* call, const StateDict& state);
void require_shape(const char* call, const std::string& name, const at::Tensor& value, at::IntArrayRef sizes);
int64_t whole_number(const char* call, const std::string& name, const at::Tensor& value);

// Says who gives values: every rank its own, or rank 0 for all.
struct Givers {
  const char* call;
  comm::Communicator& ranks;
  c10::Device device;
  bool broadcasts;

  bool reads() const { return !broadcasts || ranks.rank() == 0; }
  // Runs `look` where values are given. Where rank 0's do not fit `what`, every rank throws, the others a UsageError.
  void check(const char* what, const std::function<void()>& look) const;
};

}  // namespace ds::loops
