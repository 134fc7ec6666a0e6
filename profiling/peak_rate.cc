#include "profiling/peak_rate.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>

#include "profiling/device_clock.h"

namespace ds::profiling {

double measured_peak(c10::Device device, c10::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  const bool on_host = device.is_cpu();
  const int64_t size = on_host ? 512 : 8192;
  const int warm_ups = on_host ? 1 : 3;
  const int times = on_host ? 6 : 10;
  // Numbers as a model has them: a GPU is faster on zeros, which cost less power.
  const auto options = at::TensorOptions().device(device);
  const at::Tensor a = at::arange(size * size, options.dtype(at::kFloat)).sin().view({size, size}).to(dtype);
  at::Tensor out = at::empty({size, size}, options.dtype(dtype));
  for (int i = 0; i < warm_ups; ++i) at::mm_out(out, a, a);
  const DeviceClock clock(device);
  double best = 0;
  const auto flops = 2.0 * static_cast<double>(size) * static_cast<double>(size) * static_cast<double>(size);
  for (int i = 0; i < times; ++i) {
    const DeviceClock::Moment begin = clock.mark();
    at::mm_out(out, a, a);
    best = std::max(best, flops / DeviceClock::seconds(begin, clock.mark()));
  }
  return best;
}

}  // namespace ds::profiling
