#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <limits>
#include <utility>

#include "core/check.h"
#include "core/tensor_check.h"
#include "dsengine/sparse_attention.h"
#include "ops/attention_mask.h"

namespace ds::ops {
namespace {

constexpr const char* kSelfAttention = "dsengine::sparse_self_attention";
constexpr size_t kMostLayouts = 16;  // lengths that are kept

at::Tensor attend_to_all(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const SparseAttentionOptions& options) {
  AddedMasks masks = added_masks(kSelfAttention, query, options, query.scalar_type());
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

std::shared_ptr<const BlockLayout> SparseSelfAttention::layout(int64_t length) const {
  if (!pattern_) return nullptr;
  const std::lock_guard lock(mutex_);
  const auto found = layouts_.find(length);
  if (found != layouts_.end()) return found->second;
  auto made = std::make_shared<const BlockLayout>(block_layout(*pattern_, heads_, length, seed_));
  if (layouts_.size() >= kMostLayouts) layouts_.erase(layouts_.begin());
  layouts_[length] = made;
  return made;
}

at::Tensor SparseSelfAttention::operator()(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                           const SparseAttentionOptions& options) const {
  require(query.defined() && query.dim() == 4 && query.size(1) == heads_, kSelfAttention,
          ": expected a query of [batch, ", heads_, " heads, time, channels], found ", describe(query));
  if (!pattern_) return attend_to_all(query, key, value, options);
  return sparse_attention(query, key, value, *layout(query.size(2)), options);
}

}  // namespace ds::ops
