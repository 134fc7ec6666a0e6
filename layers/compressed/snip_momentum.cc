#include "layers/compressed/snip_momentum.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace ds::model_compression {
namespace {

constexpr double kMomentum = 0.9;
constexpr double kLeastOfLayer = 0.02;
// 0.9^160 is below the last bit of a float32.
constexpr int64_t kRemembered = 160;

int64_t changes_of(const Rule& rule) { return (rule.snip->last - rule.schedule_offset) / rule.snip->stride; }

// The weight as a matrix, whose columns are neighbouring input channels.
at::Tensor as_matrix(const at::Tensor& weight) {
  return weight.dim() == 4 ? weight.permute({0, 2, 3, 1}).reshape({weight.size(0), -1}) : weight;
}

// The numbers of the `count` largest, those that come first of equal ones.
at::Tensor places_of_largest(const at::Tensor& scores, int64_t count) {
  return std::get<1>(scores.sort(/*stable=*/true, /*dim=*/0, /*descending=*/true)).narrow(0, 0, count);
}

int64_t share_of(double ratio, int64_t count) {
  return std::min(count, static_cast<int64_t>(std::ceil(ratio * static_cast<double>(count))));
}

}  // namespace

std::optional<double> snip_dense_ratio(const Rule& rule, int64_t step) {
  const int64_t since = step - rule.schedule_offset;
  if (step > rule.snip->last || since % rule.snip->stride != 0) return std::nullopt;
  return snip_due_ratio(rule, step);
}

std::optional<double> snip_due_ratio(const Rule& rule, int64_t step) {
  const int64_t since = step - rule.schedule_offset;
  if (since < 0) return std::nullopt;
  const int64_t changes = changes_of(rule);
  if (changes == 0) return rule.dense_ratio;  // all at once
  const int64_t change = std::min(changes, since / rule.snip->stride);
  if (change == 0) return std::nullopt;
  return std::pow(rule.dense_ratio, static_cast<double>(change) / static_cast<double>(changes));
}

bool snip_counts(const Rule& rule, int64_t step) {
  const int64_t last_change = rule.schedule_offset + changes_of(rule) * rule.snip->stride;
  return step >= rule.schedule_offset - kRemembered && step < last_change;
}

bool has_blocks(const at::Tensor& weight, const BlockSize& block) {
  if (weight.dim() != 2 && weight.dim() != 4) return false;
  return weight.size(0) % block.rows == 0 && weight.numel() / weight.size(0) % block.columns == 0;
}

at::Tensor block_means(const at::Tensor& values, const BlockSize& block) {
  const at::Tensor matrix = as_matrix(values);
  const at::Tensor blocks =
      matrix.reshape({matrix.size(0) / block.rows, block.rows, matrix.size(1) / block.columns, block.columns});
  return blocks.mean(at::IntArrayRef({1, 3}));
}

at::Tensor elements_of_blocks(const at::Tensor& blocks, const BlockSize& block, c10::IntArrayRef sizes) {
  at::Tensor matrix = blocks.repeat_interleave(block.rows, 0).repeat_interleave(block.columns, 1);
  if (sizes.size() != 4) return matrix;
  return matrix.view({sizes[0], sizes[2], sizes[3], sizes[1]}).permute({0, 3, 1, 2}).contiguous();
}

void follow_score(const at::Tensor& score, const at::Tensor& mean) { score.mul_(kMomentum).add_(mean); }

std::vector<at::Tensor> best_blocks(const std::vector<at::Tensor>& scores, double ratio) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> flat;
  std::vector<at::Tensor> masks;
  int64_t reserved = 0;
  for (const at::Tensor& score : scores) {
    flat.push_back(score.reshape({-1}).to(at::kDouble));
    at::Tensor mask = at::zeros({score.numel()}, score.options().dtype(at::kBool));
    const int64_t least = share_of(kLeastOfLayer, score.numel());
    mask.index_fill_(0, places_of_largest(flat.back(), least), true);
    reserved += least;
    masks.push_back(std::move(mask));
  }
  ensure(!flat.empty(), "blocks are those of at least one layer");
  at::Tensor all = at::cat(masks);
  const int64_t others = share_of(ratio, all.numel()) - reserved;
  if (others > 0) {
    const at::Tensor free = at::cat(flat).masked_fill(all, -1.0);  // scores are not negative
    all.index_fill_(0, places_of_largest(free, others), true);
  }
  std::vector<at::Tensor> result;
  int64_t start = 0;
  for (const at::Tensor& score : scores) {
    result.push_back(all.narrow(0, start, score.numel()).view(score.sizes()));
    start += score.numel();
  }
  return result;
}

}  // namespace ds::model_compression
