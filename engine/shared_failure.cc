#include "engine/shared_failure.h"

#include <ATen/ops/scalar_tensor.h>

namespace ds::engine {

int failed_rank(const std::exception_ptr& failure, c10::Device device, comm::Communicator& world) {
  const at::Tensor failed =
      at::scalar_tensor(failure ? world.rank() : -1, at::TensorOptions().dtype(at::kLong)).view({1}).to(device);
  if (world.size() > 1) world.all_reduce(failed, comm::ReduceOp::kMax, "failure of a rank").wait();
  if (failure) std::rethrow_exception(failure);
  return static_cast<int>(failed.item<int64_t>());
}

}  // namespace ds::engine
