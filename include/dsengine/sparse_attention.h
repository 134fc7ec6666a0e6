// Attention over the blocks that a layout keeps, with time and memory in proportion to them. For programs with an
// engine, engine::sparse_self_attention() (dsengine/efficiency.h) makes it from the ds_config's section
// `sparse_attention`:
//
//   const ops::SparseSelfAttention attend({.mode = ops::SparsityMode::kBigBird}, heads, seed);
//   const at::Tensor mixed = attend(query, key, value, {.key_padding_mask = padding});   // [batch, heads, time,
//   channels]
//
// Where a layout keeps all blocks, and elsewhere with the blocks that it leaves out masked, results and gradients are
// those of scaled_dot_product_attention.
//
// On a CPU float32, float64 and bfloat16 (float32 inside) run as vector kernels with an online softmax, on LibTorch's
// threads: forward over blocks of queries, backward over heads. On other devices, and for float16, blocks of keys are
// gathered for LibTorch's operators. A query without any key, since its row of blocks is empty or masks leave nothing,
// gives 0 and gets no gradient. Sequences need not be multiples of the block: the last block is shorter.
//
// For those who watch operators the kernels are one, dsengine::sparse_attention. They save query, key, value, masks,
// the result and two numbers a query, so that a mask or result that is changed in place before backward is LibTorch's
// error there. They hold keys and values in the wide type as scratch: 2 copies forward, and 5 of each head that a
// thread works on backward. Blocks and channels are rounded up to a multiple of 16 in it, so that blocks of less take
// more. They refuse double backward (create_graph) with UsageError. Split tensors (dsengine/parallel.h) are taken where
// all three are cut alike, along batch or heads: a rank has its heads' layouts. There is no dropout of weights, as
// DeepSpeed's has none. docs/sparse_attention.md tells more.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "dsengine/sparsity_pattern.h"

namespace ds::ops {

enum class MaskMode {
  kAdd,       // is added to the scores
  kMultiply,  // 0 (false) leaves a key out, anything else keeps it
};

// Masks get no gradient and must not require one.
struct SparseAttentionOptions {
  bool causal = false;          // a query sees no later key; so it is with a unidirectional layout, too
  at::Tensor key_padding_mask;  // [batch, time], or undefined
  MaskMode key_padding_mask_mode = MaskMode::kAdd;  // DeepSpeed's defaults
  // [time, time], or [batch or 1, heads or 1, time, time], or undefined. With kAdd: a relative position bias, too.
  at::Tensor attention_mask;
  MaskMode attention_mask_mode = MaskMode::kMultiply;
  std::optional<double> scale;  // factor of the scores; empty: 1 / sqrt(channels)
};

//   query, key, value  [batch, heads, time, channels] of one shape, floating dtype and device
//   layout             of `time` tokens and 1 head or as many as they have
//   result             their shape and dtype, laid out in memory as [batch, time, heads, channels]
//
// Under autocast inputs other than float64 are cast to its dtype, as those of scaled_dot_product_attention.
//
// Any layout serves, those of block_layout() and a program's own. Throws UsageError for shapes, dtypes, devices and
// masks that do not fit.
at::Tensor sparse_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const BlockLayout& layout, const SparseAttentionOptions& options = {});

class LayoutRows;  // a layout, and what calls read of it

// A pattern, and its layouts of the lengths that came by, which are scanned once. May be called from several threads at
// once.
class SparseSelfAttention {
 public:
  // Throws UsageError for a pattern with a problem (problem_of) and for heads < 1.
  SparseSelfAttention(SparsityPattern pattern, int64_t heads, uint64_t seed);
  // Attention over all blocks by LibTorch's scaled_dot_product_attention, for programs whose config has no section.
  static SparseSelfAttention dense(int64_t heads);
  SparseSelfAttention(SparseSelfAttention&& other) noexcept;

  // Calls sparse_attention() with the layout of this length. Throws UsageError for another number of heads, too.
  at::Tensor operator()(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                        const SparseAttentionOptions& options = {}) const;

  // Nothing where all blocks are computed for lack of a section.
  const std::optional<SparsityPattern>& pattern() const { return pattern_; }
  std::shared_ptr<const BlockLayout> layout(int64_t length) const;  // null where there is no pattern

 private:
  explicit SparseSelfAttention(int64_t heads);
  std::shared_ptr<const LayoutRows> rows(int64_t length) const;

  std::optional<SparsityPattern> pattern_;
  int64_t heads_;
  uint64_t seed_ = 0;
  mutable std::mutex mutex_;
  mutable std::map<int64_t, std::shared_ptr<const LayoutRows>> layouts_;  // by number of blocks, a few
};

}  // namespace ds::ops
