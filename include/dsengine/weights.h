// A checkpoint to read from, whoever wrote it: logical (whole) tensors by path, read in parts, so that any layout can
// be filled from any other.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/source/training_state.h"

namespace ds::checkpoint {

// Paths of tensors. `name`: of a parameter or buffer as the module has it, a tied parameter under its first name.
std::string weight_path(const std::string& name);                           // "weights/h.0.ln_1.weight"
std::string buffer_path(const std::string& name);                           // "buffers/bn.running_mean"
std::string state_path(const std::string& state, const std::string& name);  // "optimizer/exp_avg/h.0.ln_1.weight"
std::string rank_path(int rank, const std::string& name);                   // "ranks/3/rng.cpu": of one rank alone
// The name behind the given folder of paths, or empty: name_in("weights/", "weights/h.0.b") == "h.0.b".
std::string name_in(const std::string& folder, const std::string& path);

struct TensorInfo {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  bool frozen = false;  // a weight that was not trained

  int64_t numel() const;
  bool operator==(const TensorInfo&) const = default;
};

// Not thread safe. Every error is an IoError that names file and tensor.
class Source {
 public:
  virtual ~Source() = default;
  Source() = default;
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  // The folder (or file) it reads, for messages.
  virtual const std::string& location() const = 0;
  virtual const TrainingState& state() const = 0;
  // By path. Weights of what was trained are float32 masters where the writer had them.
  virtual const std::map<std::string, TensorInfo>& tensors() const = 0;
  // Further names of tied parameters -> the name they are stored under.
  virtual const std::map<std::string, std::string>& aliases() const = 0;
  // Elements [offset, offset + destination.numel()) of the flattened tensor into `destination`: contiguous, on the CPU,
  // of any dtype (values are converted).
  virtual void read(const std::string& path, int64_t offset, const at::Tensor& destination) = 0;

  bool contains(const std::string& path) const { return tensors().contains(path); }
  // Throws IoError when there is none.
  const TensorInfo& info(const std::string& path) const;
  // The whole tensor, in its own dtype.
  at::Tensor tensor(const std::string& path);
};

}  // namespace ds::checkpoint
