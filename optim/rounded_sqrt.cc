#include "optim/rounded_sqrt.h"

#include <ATen/ops/empty_like.h>

#include <cstdint>

#include "core/host_threads.h"
#include "optim/kernels/square_root.h"

namespace ds::optimizers {

at::Tensor rounded_sqrt(const at::Tensor& values) {
  if (!values.is_cpu() || values.scalar_type() != at::kFloat || !values.is_contiguous()) return values.sqrt();
  at::Tensor roots = at::empty_like(values);
  const auto* from = values.const_data_ptr<float>();
  auto* to = roots.mutable_data_ptr<float>();
  constexpr int64_t kUnit = 16;
  constexpr int64_t kGrain = 1 << 15;
  for_each_range(values, kUnit, kGrain,
                 [&](int64_t begin, int64_t end) { square_roots(from + begin, end - begin, to + begin); });
  return roots;
}

}  // namespace ds::optimizers
