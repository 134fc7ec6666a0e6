#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <limits>
#include <utility>

#include "core/check.h"
#include "core/tensor_check.h"
#include "dsengine/sparse_attention.h"
#include "ops/attention_mask.h"
#include "ops/layout_attention.h"

namespace ds::ops {
namespace {

constexpr const char* kSelfAttention = "dsengine::sparse_self_attention";
constexpr size_t kMostLayouts = 16;  // that are kept

at::Tensor attend_to_all(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const SparseAttentionOptions& options) {
  check_masks(kSelfAttention, query.sizes(), query.device(), options);
  AddedMasks masks = added_masks(kSelfAttention, options, query.scalar_type());
  std::optional<at::Tensor> mask;
  if (masks.keys.defined()) mask = masks.keys.unsqueeze(1).unsqueeze(1);
  if (masks.scores.defined()) mask = mask ? *mask + masks.scores : masks.scores;
  if (!mask) return at::scaled_dot_product_attention(query, key, value, {}, 0.0, options.causal, options.scale);
  if (options.causal) {
    const at::Tensor token = at::arange(query.size(2), query.options().dtype(at::kLong).requires_grad(false));
    mask = mask->masked_fill(token.unsqueeze(0).gt(token.unsqueeze(1)), -std::numeric_limits<double>::infinity());
  }
  return at::scaled_dot_product_attention(query, key, value, mask, 0.0, false, options.scale);
}

}  // namespace

SparseSelfAttention::SparseSelfAttention(int64_t heads) : heads_(heads) {
  require(heads > 0, kSelfAttention, ": expected heads > 0, found ", heads);
}

SparseSelfAttention::SparseSelfAttention(SparsityPattern pattern, int64_t heads, uint64_t seed)
    : SparseSelfAttention(heads) {
  const std::string problem = problem_of(pattern);
  require(problem.empty(), kSelfAttention, ": ", problem);
  pattern_ = std::move(pattern);
  seed_ = seed;
}

SparseSelfAttention SparseSelfAttention::dense(int64_t heads) { return SparseSelfAttention(heads); }

SparseSelfAttention::SparseSelfAttention(SparseSelfAttention&& other) noexcept
    : pattern_(std::move(other.pattern_)),
      heads_(other.heads_),
      seed_(other.seed_),
      layouts_(std::move(other.layouts_)) {}

std::shared_ptr<const LayoutRows> SparseSelfAttention::rows(int64_t length) const {
  const int64_t blocks = (length + pattern_->block - 1) / pattern_->block;  // a layout has no other lengths
  const std::lock_guard lock(mutex_);
  const auto found = layouts_.find(blocks);
  if (found != layouts_.end()) return found->second;
  auto layout = std::make_shared<const BlockLayout>(block_layout(*pattern_, heads_, length, seed_));
  auto made = std::make_shared<const LayoutRows>(std::move(layout));
  if (layouts_.size() >= kMostLayouts) layouts_.erase(layouts_.begin());
  layouts_[blocks] = made;
  return made;
}

std::shared_ptr<const BlockLayout> SparseSelfAttention::layout(int64_t length) const {
  return pattern_ ? rows(length)->layout() : nullptr;
}

at::Tensor SparseSelfAttention::operator()(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                           const SparseAttentionOptions& options) const {
  require(query.defined() && query.dim() == 4 && query.size(1) == heads_, kSelfAttention,
          ": expected a query of [batch, ", heads_, " heads, time, channels], found ", describe(query));
  if (!pattern_) return attend_to_all(query, key, value, options);
  return attention_of_layout(query, key, value, *rows(query.size(2)), options);
}

}  // namespace ds::ops
