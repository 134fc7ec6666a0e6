#include "loops/given_values.h"

#include <exception>

#include "comm/agreement.h"
#include "core/check.h"
#include "core/tensor_check.h"

namespace ds::loops {

ValuesByName by_name(const char* call, const StateDict& state) {
  ValuesByName values;
  for (const auto& [name, tensor] : state) {
    require(values.emplace(name, tensor).second, call, ": expected each name once, found ", name, " twice");
  }
  return values;
}

void require_shape(const char* call, const std::string& name, const at::Tensor& value, at::IntArrayRef sizes) {
  require(value.defined() && value.sizes() == sizes, call, ": ", name, ": expected a tensor of shape ", sizes,
          ", found ", describe(value));
}

int64_t whole_number(const char* call, const std::string& name, const at::Tensor& value) {
  require(value.defined() && value.numel() == 1, call, ": ", name, ": expected a tensor with one number, found ",
          describe(value));
  return value.item<int64_t>();
}

void Givers::check(const char* what, const std::function<void()>& look) const {
  std::exception_ptr failure;
  try {
    if (reads()) look();
  } catch (...) {
    failure = std::current_exception();
  }
  if (!broadcasts) {
    if (failure) std::rethrow_exception(failure);
    return;
  }
  const int failed = comm::failed_rank(failure, device, ranks);
  require(failed < 0, call, ": the state of rank ", failed, " does not fit ", what, ", its message says why");
}

}  // namespace ds::loops
