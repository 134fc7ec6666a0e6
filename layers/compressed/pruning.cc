#include "layers/compressed/pruning.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/random_streams.h"
#include "layers/compressed/quantizers.h"
#include "layers/compressed/snip_momentum.h"

namespace ds::model_compression {
namespace {

constexpr const char* kBlockScores = "sparse_pruning_scores";

struct MaskNames {
  const char* scores;
  const char* mask;
};
MaskNames names_of(Method method) {
  switch (method) {
    case Method::kSparsePruning:
      return {"sparse_mask_scores", "sparse_pruning_mask"};
    case Method::kRowPruning:
      return {"row_mask_scores", "row_pruning_mask"};
    case Method::kHeadPruning:
      return {"head_pruning_scores", "head_pruning_mask"};
    default:
      return {"channel_mask_scores", "channel_pruning_mask"};
  }
}

std::vector<int64_t> mask_shape(const Rule& rule, const at::Tensor& weight) {
  if (rule.method == Method::kSparsePruning) return weight.sizes().vec();
  if (rule.method == Method::kHeadPruning) return {1, rule.heads};
  std::vector<int64_t> shape(static_cast<size_t>(weight.dim()), 1);
  shape[0] = weight.size(0);
  return shape;
}

// Draws scores as torch's kaiming_uniform_ does with a = sqrt(5): within 1 / sqrt(elements of one entry of the first
// dimension).
at::Tensor start_scores(const std::vector<int64_t>& shape, const at::Tensor& weight, const RandomStream& stream) {
  int64_t fan_in = 1;
  for (size_t d = 1; d < shape.size(); ++d) fan_in *= shape[d];
  const double bound = 1.0 / std::sqrt(static_cast<double>(std::max<int64_t>(fan_in, 1)));
  const at::Tensor values = at::rand(shape, generator_of(stream), at::TensorOptions().dtype(at::kDouble));
  const at::Device device = weight.is_meta() ? at::Device(at::kCPU) : weight.device();
  return ((values * 2 - 1) * bound).to(weight.scalar_type()).to(device).set_requires_grad(true);
}

at::Tensor with_mask(const Rule& rule, const at::Tensor& weight, const at::Tensor& mask) {
  if (rule.method != Method::kHeadPruning) return weight * mask;
  return (weight.reshape({weight.size(0), rule.heads, -1}) * mask.view({1, rule.heads, 1})).reshape(weight.sizes());
}

at::Tensor l1_scores(const Rule& rule, const at::Tensor& weight) {
  const at::Tensor values = weight.detach();
  const at::ScalarType type = values.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor size = values.abs().to(type);
  if (rule.method == Method::kSparsePruning) return size;
  if (rule.method == Method::kHeadPruning)
    return size.view({size.size(0), rule.heads, -1}).sum(at::IntArrayRef({0, 2})).view({1, -1});
  return size.flatten(1).sum(1);
}

}  // namespace

Pruning::Pruning(const Rule& rule, const std::string& layer, const at::Tensor& weight, torch::nn::Module& keeper,
                 uint64_t seed)
    : rule_(rule) {
  const std::vector<int64_t> shape = mask_shape(rule, weight);
  if (rule.learns_scores) {
    const std::string purpose = cat(layer, ".", scores_name());
    const RandomStream stream{.seed = seed, .purpose = purpose};
    scores_ = keeper.register_parameter(scores_name(), start_scores(shape, weight, stream));
    return;
  }
  const at::Device device = weight.is_meta() ? at::Device(at::kCPU) : weight.device();
  mask_ = keeper.register_buffer(names_of(rule.method).mask, at::ones(shape, at::dtype(at::kBool).device(device)));
  if (!rule.snip) return;
  const BlockSize& block = rule.snip->block;
  const std::vector<int64_t> blocks = {weight.size(0) / block.rows, weight.numel() / weight.size(0) / block.columns};
  block_scores_ = keeper.register_buffer(kBlockScores, at::zeros(blocks, at::dtype(at::kFloat).device(device)));
}

const char* Pruning::scores_name() const { return names_of(rule_.method).scores; }

bool Pruning::masks_outputs() const {
  return rule_.method == Method::kRowPruning || rule_.method == Method::kChannelPruning;
}

at::Tensor Pruning::mask_now() const {
  if (!scores_.defined()) return mask_;
  const at::Tensor chosen = largest_mask(scores_, rule_.dense_ratio);
  return straight_through(scores_, chosen.to(scores_.scalar_type()));
}

at::Tensor Pruning::masked_weight(const at::Tensor& weight) const { return with_mask(rule_, weight, mask_now()); }

at::Tensor Pruning::masked_bias(const at::Tensor& bias) const { return bias * mask_now().view(-1); }

at::Tensor Pruning::final_mask(const at::Tensor& scores) const {
  return (scores_.defined() ? largest_mask(scores, rule_.dense_ratio) : mask_).flatten();
}

Operands Pruning::final_values(const Operands& operands, const at::Tensor& scores) const {
  const at::Tensor mask = final_mask(scores).to(operands.weight.device());
  Operands result = operands;
  result.weight = with_mask(rule_, operands.weight, mask.view(mask_shape(rule_, operands.weight)));
  if (masks_outputs() && operands.bias.defined()) result.bias = operands.bias * mask;
  return result;
}

bool Pruning::awaits_mask() {
  if (!mask_.defined() || rule_.snip) return false;
  // A checkpoint may have brought a mask, or taken one away.
  if (const int64_t version = mask_._version(); version != seen_version_) {
    decided_ = !mask_.all().item<bool>();
    seen_version_ = version;
  }
  return !decided_;
}

void Pruning::decide_mask(const at::Tensor& weight) {
  if (!mask_.defined() || rule_.snip || decided_) return;
  mask_.copy_(largest_mask(l1_scores(rule_, weight), rule_.dense_ratio).view(mask_.sizes()));
  decided_ = true;
  seen_version_ = mask_._version();
}

void Pruning::see_gradient(const at::Tensor& weight, const at::Tensor& gradient) {
  // The gradient of a pruned element is zero: its operator computed with the mask.
  seen_ = block_means((weight * gradient).abs(), rule_.snip->block).to(block_scores_.device());
}

void Pruning::keep_seen() {
  if (seen_.defined()) follow_score(block_scores_, std::exchange(seen_, at::Tensor()));
}

void Pruning::prune_blocks(const at::Tensor& stays) const {
  mask_.copy_(elements_of_blocks(stays, rule_.snip->block, mask_.sizes()));
}

}  // namespace ds::model_compression
