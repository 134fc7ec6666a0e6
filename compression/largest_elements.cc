#include "compression/largest_elements.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/ge.h>
#include <ATen/ops/gt.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/topk.h>

#include <tuple>

namespace ds::compression {
namespace {

at::Tensor largest_of(const at::Tensor& magnitudes, int64_t count) {
  const at::Tensor least = std::get<0>(at::topk(magnitudes, count, 0, /*largest=*/true, /*sorted=*/false)).min();
  const at::Tensor above = at::nonzero(magnitudes > least).view(-1);
  const at::Tensor ties = at::nonzero(magnitudes == least).view(-1).narrow(0, 0, count - above.numel());
  return at::cat({above, ties});
}

// Ascending positions of more elements than the `count` largest, these among them; undefined where it is not worth it.
// As Deep Gradient Compression does, a sample tells how large they are.
at::Tensor candidates_for(const at::Tensor& magnitudes, int64_t count) {
  constexpr int64_t kStride = 61;  // no likely width of a matrix
  constexpr int64_t kSpare = 64;
  const at::Tensor sample = magnitudes.slice(0, 0, magnitudes.numel(), kStride);
  const int64_t sampled = count / kStride * 5 / 4 + kSpare;
  if (sampled > sample.numel() / 2) return {};
  const at::Tensor bound = std::get<0>(at::topk(sample, sampled, 0, /*largest=*/true, /*sorted=*/false)).min();
  const at::Tensor candidates = at::nonzero(magnitudes >= bound).view(-1);
  return candidates.numel() >= count ? candidates : at::Tensor();
}

// A device's elements as numbers of which no two are equal: the magnitude's bits, then the place from the end. What was
// compared with nonzero() would make the host wait for how many there are.
at::Tensor largest_by_keys(const at::Tensor& values, int64_t count) {
  constexpr int64_t kPlaceBits = 32;
  const at::Tensor keys = values.to(at::kFloat).abs().view(at::kInt).to(at::kLong);
  keys.bitwise_left_shift_(kPlaceBits).sub_(at::arange(values.numel(), keys.options().dtype(at::kInt)));
  return std::get<1>(at::topk(keys, count, 0, /*largest=*/true, /*sorted=*/false));
}

}  // namespace

at::Tensor largest_elements(const at::Tensor& values, int64_t count) {
  const auto positions = values.options().dtype(at::kLong);
  if (count == values.numel()) return at::arange(count, positions);
  if (count == 0) return at::empty({0}, positions);
  if (!values.is_cpu()) return largest_by_keys(values, count);
  const at::Tensor magnitudes = values.abs();
  const at::Tensor candidates = candidates_for(magnitudes, count);
  if (!candidates.defined()) return largest_of(magnitudes, count);
  return candidates.index_select(0, largest_of(magnitudes.index_select(0, candidates), count));
}

}  // namespace ds::compression
