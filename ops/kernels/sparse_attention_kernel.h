// Attention over chosen blocks of keys, forward and backward, in one pass with an online softmax (FlashAttention,
// arXiv:2205.14135). Torch-free. A block that is not in the list is neither read nor computed.
//
// Queries, keys and values are taken apart into scratch of the wide type first (float_type.h), each block of tokens
// padded to a multiple of kPanel with zeros: rows [token, channel] and panels [token / kPanel, channel, token %
// kPanel], so that vectors run over channels or over keys without gathers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/kernels/float_type.h"

namespace ds::ops {

constexpr int64_t kPanel = 16;      // tokens or channels that lie side by side: a multiple of every vector length used
constexpr int64_t kMostRows = 64;   // queries that are worked on at once
constexpr int64_t kTileKeys = 256;  // keys that are worked on at once
constexpr int64_t kTileStride = kTileKeys + kPanel;  // so that rows of a tile do not share cache sets

// A tensor of [batch, heads, tokens, channels]; channels lie side by side.
struct AttentionTensor {
  void* data = nullptr;
  int64_t strides[3] = {0, 0, 0};  // in elements: batch, head, token
};

struct SparseAttentionShape {
  FloatType type = FloatType::kFloat32;
  int64_t heads = 0, length = 0, channels = 0;
  int64_t block = 0;   // tokens
  int64_t blocks = 0;  // ceil(length / block)
  double scale = 1.0;
  bool causal = false;
  int64_t layout_heads = 1;          // 1 or heads
  const int64_t* offsets = nullptr;  // [layout_heads * blocks + 1]: a row's columns are those from offsets[row] on
  const int64_t* columns = nullptr;  // ascending in a row
  // Added to scores, of the wide type, or null; -inf leaves a key out.
  const void* key_mask = nullptr;        // [batch, length]
  const void* attention_mask = nullptr;  // elements of a row lie side by side
  int64_t mask_strides[3] = {0, 0, 0};   // batch, head, query

  int64_t padded_block() const { return (std::min(block, length) + kPanel - 1) / kPanel * kPanel; }
  int64_t padded_length() const { return blocks * padded_block(); }
  int64_t padded_channels() const { return (channels + kPanel - 1) / kPanel * kPanel; }
  int64_t packed_size() const { return padded_length() * padded_channels(); }  // elements of one head
};

// Scratch of the wide type, [batch * heads, packed_size()] each.
struct PackedKeys {
  void* key_panels = nullptr;
  void* value_rows = nullptr;
};

// Heads `begin` to `end` - 1 of batch * heads: what forward reads.
void pack_keys(const SparseAttentionShape& shape, const AttentionTensor& key, const AttentionTensor& value,
               const PackedKeys& packed, int64_t begin, int64_t end);

struct SparseAttentionForward {
  AttentionTensor query, output;
  PackedKeys packed;
  // Wide [batch * heads, length] each. Two numbers, since their sum is the largest score alone where that is -1e9. A
  // query without keys, whose output is 0, has 0 and +inf.
  void* largest = nullptr;     // score
  void* log_of_sum = nullptr;  // of the exponentials of scores less the largest
};
// Blocks of queries `begin` to `end` - 1 of batch * heads * blocks.
void sparse_attention_forward(const SparseAttentionShape& shape, const SparseAttentionForward& arrays, int64_t begin,
                              int64_t end);

struct SparseAttentionBackward {
  AttentionTensor query, key, value, output, output_gradient;
  const void* largest = nullptr;  // as forward gives them
  const void* log_of_sum = nullptr;
  AttentionTensor query_gradient, key_gradient, value_gradient;
};
// Heads `begin` to `end` - 1 of batch * heads; scratch is its own, 5 packed_size().
void sparse_attention_backward(const SparseAttentionShape& shape, const SparseAttentionBackward& arrays, int64_t begin,
                               int64_t end);

}  // namespace ds::ops
