#include "optim/slice_update.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>

namespace ds::optimizers {
namespace {

// Elements of a chunk. On the host a chunk of master and gradient stays in the cache; a device wants fewer launches.
constexpr int64_t kHostChunk = int64_t{1} << 18;
constexpr int64_t kDeviceChunk = int64_t{1} << 24;

}  // namespace

at::ScalarType state_type(at::ScalarType master) { return master == at::kDouble ? at::kDouble : at::kFloat; }

void for_each_chunk(const at::Tensor& master, const at::Tensor& gradient, KernelMemory memory,
                    const SliceKernel& kernel) {
  const at::NoGradGuard no_grad;
  const at::ScalarType type = state_type(master.scalar_type());
  const bool converts_master = master.scalar_type() != type;
  const bool converts_gradient = gradient.scalar_type() != type;
  const int64_t total = master.numel();
  if (total == 0) return;
  if (memory == KernelMemory::kFused && !converts_master && !converts_gradient) {
    kernel(0, master, gradient);
    return;
  }
  const int64_t chunk = std::min(total, master.is_cpu() ? kHostChunk : kDeviceChunk);
  const at::TensorOptions options = master.options().dtype(type);
  const at::Tensor master_buffer = converts_master ? at::empty({chunk}, options) : at::Tensor();
  const at::Tensor gradient_buffer = converts_gradient ? at::empty({chunk}, options) : at::Tensor();
  for (int64_t begin = 0; begin < total; begin += chunk) {
    const int64_t length = std::min(chunk, total - begin);
    const at::Tensor own = master.narrow(0, begin, length);
    const at::Tensor received = gradient.narrow(0, begin, length);
    const at::Tensor m = converts_master ? master_buffer.narrow(0, 0, length).copy_(own) : own;
    const at::Tensor g = converts_gradient ? gradient_buffer.narrow(0, 0, length).copy_(received) : received;
    kernel(begin, m, g);
    if (converts_master) own.copy_(m);
  }
}

std::optional<at::Tensor> fused_grad_scale(double gradient_scale, const at::Tensor& master) {
  if (gradient_scale == 1.0 || state_type(master.scalar_type()) == at::kDouble) return std::nullopt;
  return at::full({}, 1.0 / gradient_scale, at::TensorOptions().dtype(at::kFloat).device(master.device()));
}

void scale_wide(const at::Tensor& gradient, double gradient_scale) {
  if (gradient_scale != 1.0 && gradient.scalar_type() == at::kDouble) at::Tensor(gradient).mul_(gradient_scale);
}

at::Tensor fused_step(double step, at::Device device) {
  return at::full({}, step, at::TensorOptions().dtype(at::kFloat).device(device));
}

}  // namespace ds::optimizers
