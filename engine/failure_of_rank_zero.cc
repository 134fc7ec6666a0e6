#include "engine/failure_of_rank_zero.h"

#include <ATen/ops/scalar_tensor.h>

#include "core/check.h"

namespace ds::engine {

void share_failure_of_rank_zero(const std::exception_ptr& failure, const std::string& message, c10::Device device,
                                comm::Communicator& world) {
  at::Tensor failed = at::scalar_tensor(failure ? 1 : 0, at::TensorOptions().dtype(at::kLong)).view({1}).to(device);
  if (world.size() > 1) world.broadcast(failed, 0, "failure of rank 0").wait();
  if (world.rank() == 0 && failure) std::rethrow_exception(failure);
  require<IoError>(failed.item<int64_t>() == 0, message);
}

}  // namespace ds::engine
