#include "model/agreement/shared_failure.h"

#include <ATen/ops/scalar_tensor.h>

namespace ds::engine {

int failed_rank(const std::exception_ptr& failure, c10::Device device, comm::Communicator& world) {
  const int64_t failed = largest_of_ranks(failure ? world.rank() : -1, device, world, "failure of a rank");
  if (failure) std::rethrow_exception(failure);
  return static_cast<int>(failed);
}

int64_t largest_of_ranks(int64_t value, c10::Device device, comm::Communicator& world, const char* label) {
  if (world.size() == 1) return value;
  const at::Tensor largest = at::scalar_tensor(value, at::TensorOptions().dtype(at::kLong)).view({1}).to(device);
  world.all_reduce(largest, comm::ReduceOp::kMax, label).wait();
  return largest.item<int64_t>();
}

std::string message_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

}  // namespace ds::engine
