// Which blocks of an attention matrix are computed: the patterns of DeepSpeed's sparse attention (0.19.6), as data.
// Torch-free, pure; any thread.
//
// A sequence of L tokens has n = ceil(L / block) blocks; a layout says for each head, block of queries and block of
// keys whether it is computed. What DeepSpeed takes from a generator is a function of seed, head and block here, the
// same on every rank.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ds::ops {

enum class SparsityMode {
  kDense,          // all blocks
  kFixed,          // windows and columns that stand for windows (Sparse Transformers, arXiv:1904.10509, changed)
  kVariable,       // windows of several sizes, global and random columns
  kBigBird,        // a sliding window, random columns, global rows and columns (arXiv:2007.14062)
  kBSLongformer,   // a sliding window, global rows and columns (Longformer, arXiv:2004.05150, in blocks)
  kSlidingWindow,  // a sliding window alone: DeepSpeed's LocalSlidingWindowSparsityConfig, which its config cannot name
};

// Each field counts for the modes beside it. Defaults are those of DeepSpeed's ds_config.
struct SparsityPattern {
  SparsityMode mode = SparsityMode::kFixed;
  int64_t block = 16;                         // tokens
  bool different_layout_per_head = false;     // random columns and, of kFixed, global columns differ from head to head
  bool unidirectional = false;                // blocks above the diagonal are left out
  int64_t num_local_blocks = 4;               // fixed: blocks of a window
  int64_t num_global_blocks = 1;              // fixed: of each window; bigbird: the first of the sequence, or 0
  bool horizontal_global_attention = false;   // fixed, variable: global blocks also attend to all. Bidirectional only
  int64_t num_different_global_patterns = 1;  // fixed: head h has pattern h modulo this
  int64_t num_random_blocks = 0;              // variable, bigbird: columns drawn for each row
  std::vector<int64_t> local_window_blocks = {4};  // variable: sizes of the windows; the last one repeats
  // variable, bslongformer: global blocks, or where ranges of them begin; those beyond a sequence count for nothing.
  std::vector<int64_t> global_block_indices = {0};
  std::optional<std::vector<int64_t>> global_block_end_indices;  // where these ranges end, exclusive
  int64_t num_sliding_window_blocks = 3;  // bigbird, bslongformer, sliding window: w blocks are w / 2 to each side
};

// Says what is wrong with the pattern, in words that begin with the field's name; empty: nothing.
std::string problem_of(const SparsityPattern& pattern);

// An immutable choice of blocks.
struct BlockLayout {
  int64_t heads = 1;          // 1: of all heads
  int64_t blocks = 0;         // n
  int64_t block = 16;         // tokens
  std::vector<uint8_t> kept;  // [heads, n, n], row-major: 1 where the block of keys is computed for that of queries
  bool causal = false;        // a query sees no later key, within blocks too: so it is of unidirectional patterns

  bool has(int64_t head, int64_t row, int64_t column) const {
    return kept[static_cast<size_t>(((heads == 1 ? 0 : head) * blocks + row) * blocks + column)] != 0;
  }
  // The number of kept blocks over all heads; where heads is 1, of that one.
  int64_t count() const;
};

// The layout of sequences of `length` tokens. One head in it where all are alike. Short sequences get what of a pattern
// there is room for: a window wider than they are, or more random columns, make rows dense.
//
// Random columns of a row are the num_random_blocks columns c of the smallest keys, of 0 to n - 1, or 0 to row where
// the pattern is unidirectional. key = m(m(m(m(seed + g) + g (head + 1)) + g (row + 1)) + g (c + 1)) modulo 2^64, with
// the function m and the constant g of SplitMix64. So a layout of a unidirectional pattern is the upper left corner of
// that of a longer sequence. The exception is kFixed where both num_global_blocks and num_different_global_patterns are
// above 1: a last window that is too short for its global columns has other ones then, as DeepSpeed's.
//
// Throws UsageError for a pattern with a problem, heads < 1 and length < 1.
BlockLayout block_layout(const SparsityPattern& pattern, int64_t heads, int64_t length, uint64_t seed);

}  // namespace ds::ops
