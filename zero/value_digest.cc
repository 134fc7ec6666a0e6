#include "zero/value_digest.h"

#include <ATen/core/grad_mode.h>

#include <string_view>

#include "core/text.h"
#include "core/text_hash.h"

namespace ds::zero {

uint64_t digest_of(const at::Tensor& values) {
  constexpr int64_t kMost = 1024;
  const at::NoGradGuard no_grad;
  at::Tensor sample = values.detach().reshape({-1});
  if (sample.numel() > kMost) sample = sample.slice(0, 0, sample.numel(), sample.numel() / kMost);
  sample = sample.to(at::kCPU).contiguous();
  const std::string_view bytes(static_cast<const char*>(sample.const_data_ptr()), sample.nbytes());
  return fnv1a(cat(c10::toString(values.scalar_type()), values.sizes(), bytes));
}

}  // namespace ds::zero
