#include "offload/write_back.h"

#include <utility>

#include "core/check.h"

namespace ds::offload {

WriteBack::WriteBack(at::Device device, std::vector<at::Tensor> buffers) : stream_(device) {
  ensure(!buffers.empty(), "weights are written back through at least one buffer");
  for (at::Tensor& buffer : buffers) buffers_.push_back({std::move(buffer), {}});
}

void WriteBack::send(const at::Tensor& to, const std::function<void(const at::Tensor& buffer)>& fill) {
  Buffer& buffer = buffers_[next_];
  next_ = (next_ + 1) % buffers_.size();
  stream_.wait_on_host(buffer.sent);
  const at::Tensor weights = buffer.memory.narrow(0, 0, to.numel());
  fill(weights);
  buffer.sent = stream_.copy(to, weights);
  stream_.wait_on_device(buffer.sent);
}

}  // namespace ds::offload
