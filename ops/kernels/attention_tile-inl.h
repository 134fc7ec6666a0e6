// The parts that forward and backward of sparse attention share: products of small matrices in registers, packing, the
// keys of a row of blocks, masked scores. Compiled once per instruction set.
#include <hwy/aligned_allocator.h>
#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "ops/kernels/row_pass-inl.h"
#include "ops/kernels/sparse_attention_kernel.h"

#if defined(DS_OPS_KERNELS_ATTENTION_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DS_OPS_KERNELS_ATTENTION_TILE_INL_H_
#undef DS_OPS_KERNELS_ATTENTION_TILE_INL_H_
#else
#define DS_OPS_KERNELS_ATTENTION_TILE_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace ds::ops::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <class T>
using PanelTag = hn::CappedTag<T, kPanel>;

// Element (row, depth); either may be the one whose elements lie side by side.
template <class T>
struct LeftFactor {
  const T* data;
  size_t row_stride, depth_stride;
};
// Element (depth, column): kPanel columns lie side by side.
template <class T>
struct RightFactor {
  const T* data;
  size_t depth_stride, panel_stride;
};
template <class T>
struct ProductSum {
  T* data;
  size_t row_stride;
};

// `kRows` rows by `kVectors` vectors of columns from `column` on.
template <int kRows, int kVectors, bool kAdds, class T>
HWY_INLINE void tile_product(const LeftFactor<T>& left, const RightFactor<T>& right, const ProductSum<T>& sum,
                             size_t column, size_t depth) {
  const PanelTag<T> d;
  const size_t lanes = hn::Lanes(d);
  hn::Vec<PanelTag<T>> sums[kRows][kVectors];
  const T* b[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    const size_t at = column + static_cast<size_t>(v) * lanes;
    b[v] = right.data + at / kPanel * right.panel_stride + at % kPanel;
    for (int r = 0; r < kRows; ++r) {
      T* const to = sum.data + static_cast<size_t>(r) * sum.row_stride + at;
      sums[r][v] = kAdds ? hn::LoadU(d, to) : hn::Zero(d);
    }
  }
  const T* a = left.data;
  for (size_t k = 0; k < depth; ++k, a += left.depth_stride) {
    hn::Vec<PanelTag<T>> loaded[kVectors];
    for (int v = 0; v < kVectors; ++v) loaded[v] = hn::LoadU(d, b[v] + k * right.depth_stride);
    for (int r = 0; r < kRows; ++r) {
      const auto factor = hn::Set(d, a[static_cast<size_t>(r) * left.row_stride]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::MulAdd(factor, loaded[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      hn::StoreU(sums[r][v], d,
                 sum.data + static_cast<size_t>(r) * sum.row_stride + column + static_cast<size_t>(v) * lanes);
    }
  }
}

template <int kVectors, bool kAdds, class T>
HWY_INLINE void strip_product(const LeftFactor<T>& left, const RightFactor<T>& right, const ProductSum<T>& sum,
                              size_t rows, size_t column, size_t depth) {
  constexpr size_t kRows = 4;
  size_t row = 0;
  const auto left_at = [&](size_t r) HWY_ATTR {
    return LeftFactor<T>{left.data + r * left.row_stride, left.row_stride, left.depth_stride};
  };
  const auto sum_at = [&](size_t r) HWY_ATTR { return ProductSum<T>{sum.data + r * sum.row_stride, sum.row_stride}; };
  for (; row + kRows <= rows; row += kRows) {
    tile_product<kRows, kVectors, kAdds>(left_at(row), right, sum_at(row), column, depth);
  }
  for (; row < rows; ++row) tile_product<1, kVectors, kAdds>(left_at(row), right, sum_at(row), column, depth);
}

// sum = left * right, or is added to. `columns` is a multiple of kPanel.
template <bool kAdds, class T>
HWY_NOINLINE void multiply(const LeftFactor<T>& left, const RightFactor<T>& right, const ProductSum<T>& sum,
                           size_t rows, size_t columns, size_t depth) {
  // 16 sums, 4 loaded and a factor need 21 of the 32 registers that wide instruction sets have; others have 16.
  constexpr int kVectors = HWY_MAX_BYTES >= 64 ? 4 : 2;
  const size_t lanes = hn::Lanes(PanelTag<T>());
  size_t column = 0;
  for (; column + kVectors * lanes <= columns; column += kVectors * lanes) {
    strip_product<kVectors, kAdds>(left, right, sum, rows, column, depth);
  }
  for (; column < columns; column += lanes) strip_product<1, kAdds>(left, right, sum, rows, column, depth);
}

// Keys that lie together in packed memory. The first `valid` of `width` are tokens.
struct KeyPiece {
  int64_t start;     // in packed memory
  int64_t position;  // token of the first
  int64_t width, valid;
};

struct PieceRange {
  const KeyPiece *first, *end;
};

// One head of packed memory, and the sizes in it.
struct PackedSize {
  explicit PackedSize(const SparseAttentionShape& shape)
      : block(shape.block),
        padded_block(shape.padded_block()),
        channels(static_cast<size_t>(shape.channels)),
        padded_channels(static_cast<size_t>(shape.padded_channels())) {}
  int64_t block, padded_block;
  size_t channels, padded_channels;

  // The panels from token `start` (packed) on; each is [channels][kPanel].
  template <class T>
  RightFactor<T> panels_at(const T* panels, int64_t start) const {
    return {panels + static_cast<size_t>(start) * channels, static_cast<size_t>(kPanel), channels * kPanel};
  }
  template <class T>
  RightFactor<T> rows_at(const T* rows, int64_t start) const {
    return {rows + static_cast<size_t>(start) * padded_channels, padded_channels, static_cast<size_t>(kPanel)};
  }
};

template <class Format>
HWY_INLINE const typename Format::Raw* token_of(const AttentionTensor& tensor, int64_t batch, int64_t head,
                                                int64_t token) {
  return static_cast<const typename Format::Raw*>(tensor.data) + batch * tensor.strides[0] + head * tensor.strides[1] +
         token * tensor.strides[2];
}
template <class Format>
HWY_INLINE typename Format::Raw* own_token_of(const AttentionTensor& tensor, int64_t batch, int64_t head,
                                              int64_t token) {
  return static_cast<typename Format::Raw*>(tensor.data) + batch * tensor.strides[0] + head * tensor.strides[1] +
         token * tensor.strides[2];
}

// Widened and multiplied, with zeros up to `padded`.
template <class Format>
HWY_INLINE void widen_row(const typename Format::Raw* from, size_t size, size_t padded, typename Format::Lane factor,
                          typename Format::Lane* to) {
  using T = typename Format::Lane;
  const Tag<Format> d;
  const auto by = hn::Set(d, factor);
  for_vectors(size, hn::Lanes(d), [&](size_t i, auto /*k*/, auto part) HWY_ATTR {
    part.template store<Wide<Format>>(hn::Mul(part.template load<Format>(from + i), by), to + i);
  });
  std::fill(to + size, to + padded, T{0});
}

template <class Format>
HWY_INLINE void narrow_row(const typename Format::Lane* from, size_t size, typename Format::Lane factor,
                           typename Format::Raw* to) {
  const Tag<Format> d;
  const auto by = hn::Set(d, factor);
  for_vectors(size, hn::Lanes(d), [&](size_t i, auto /*k*/, auto part) HWY_ATTR {
    part.template store<Format>(hn::Mul(part.template load<Wide<Format>>(from + i), by), to + i);
  });
}

// Tokens of one block as rows, those it lacks as zeros.
template <class Format>
HWY_INLINE void pack_block_rows(const SparseAttentionShape& shape, const AttentionTensor& tensor, int64_t batch,
                                int64_t head, int64_t block, typename Format::Lane* rows) {
  using T = typename Format::Lane;
  const PackedSize size(shape);
  const int64_t first = block * size.block;
  const int64_t valid = std::min(size.block, shape.length - first);
  for (int64_t i = 0; i < valid; ++i) {
    widen_row<Format>(token_of<Format>(tensor, batch, head, first + i), size.channels, size.padded_channels, T{1},
                      rows + static_cast<size_t>(i) * size.padded_channels);
  }
  std::fill(rows + static_cast<size_t>(valid) * size.padded_channels,
            rows + static_cast<size_t>(size.padded_block) * size.padded_channels, T{0});
}

template <class T>
HWY_INLINE void rows_to_panels(const PackedSize& size, const T* rows, T* panels) {
  for (int64_t first = 0; first < size.padded_block; first += kPanel) {
    const T* const from = rows + static_cast<size_t>(first) * size.padded_channels;
    T* const to = panels + static_cast<size_t>(first) * size.channels;
    for (size_t channel = 0; channel < size.channels; ++channel) {
      for (size_t i = 0; i < kPanel; ++i) to[channel * kPanel + i] = from[i * size.padded_channels + channel];
    }
  }
}

// The keys that queries `first` to `first + rows` - 1 of one block see, as few pieces as possible.
HWY_INLINE void pieces_of(const SparseAttentionShape& shape, int64_t head, int64_t row_block, int64_t last_query,
                          std::vector<KeyPiece>& pieces) {
  constexpr int64_t kPiece = kTileKeys / 2;
  pieces.clear();
  const int64_t padded = shape.padded_block();
  const int64_t row = (shape.layout_heads == 1 ? 0 : head) * shape.blocks + row_block;
  for (int64_t entry = shape.offsets[row]; entry < shape.offsets[row + 1]; ++entry) {
    const int64_t column = shape.columns[entry];
    const int64_t tokens = std::min(shape.block, shape.length - column * shape.block);
    for (int64_t part = 0; part < tokens; part += kPiece) {
      const KeyPiece piece{column * padded + part, column * shape.block + part, std::min(kPiece, padded - part),
                           std::min(kPiece, tokens - part)};
      if (shape.causal && piece.position > last_query) return;
      const bool joins = !pieces.empty() && pieces.back().valid == pieces.back().width &&
                         pieces.back().start + pieces.back().width == piece.start &&
                         pieces.back().position + pieces.back().width == piece.position &&
                         pieces.back().width + piece.width <= kTileKeys;
      if (joins) {
        pieces.back().width += piece.width;
        pieces.back().valid += piece.valid;
      } else {
        pieces.push_back(piece);
      }
    }
  }
}

// Calls body(first piece, end, columns) for tiles of up to kTileKeys columns.
template <class Body>
HWY_INLINE void for_tiles(const std::vector<KeyPiece>& pieces, const Body& body) {
  size_t first = 0;
  while (first < pieces.size()) {
    int64_t columns = 0;
    size_t end = first;
    for (; end < pieces.size() && columns + pieces[end].width <= kTileKeys; ++end) columns += pieces[end].width;
    body(pieces.data() + first, pieces.data() + end, static_cast<size_t>(columns));
    first = end;
  }
}

// Queries that are worked on together.
struct QueryRows {
  int64_t batch, head;
  int64_t first, count;  // tokens
};

template <class T>
HWY_INLINE void mask_piece(const SparseAttentionShape& shape, const QueryRows& queries, const KeyPiece& piece,
                           T* scores) {
  constexpr T kLeftOut = -std::numeric_limits<T>::infinity();
  const auto* const key_mask = static_cast<const T*>(shape.key_mask);
  const auto* const mask = static_cast<const T*>(shape.attention_mask);
  const int64_t* const strides = shape.mask_strides;
  for (int64_t i = 0; i < queries.count; ++i) {
    T* const row = scores + i * kTileStride;
    const int64_t query = queries.first + i;
    if (key_mask != nullptr) {
      const T* const added = key_mask + queries.batch * shape.length + piece.position;
      for (int64_t j = 0; j < piece.valid; ++j) row[j] += added[j];
    }
    if (mask != nullptr) {
      const T* const added =
          mask + queries.batch * strides[0] + queries.head * strides[1] + query * strides[2] + piece.position;
      for (int64_t j = 0; j < piece.valid; ++j) row[j] += added[j];
    }
    const int64_t seen = shape.causal ? std::max<int64_t>(0, query - piece.position + 1) : piece.valid;
    const int64_t end = std::min(piece.valid, seen);
    std::fill(row + end, row + piece.width, kLeftOut);
  }
}

// Scores of a tile, [count, kTileStride]: scaled, masked; -inf where there is no key.
template <class T>
HWY_INLINE void score_tile(const SparseAttentionShape& shape, const QueryRows& queries, const T* scaled_queries,
                           const T* key_panels, const PieceRange& pieces, T* scores) {
  const PackedSize size(shape);
  T* to = scores;
  for (const KeyPiece* piece = pieces.first; piece != pieces.end; to += piece->width, ++piece) {
    multiply<false>(LeftFactor<T>{scaled_queries, size.padded_channels, 1}, size.panels_at(key_panels, piece->start),
                    ProductSum<T>{to, kTileStride}, static_cast<size_t>(queries.count),
                    static_cast<size_t>(piece->width), size.channels);
    mask_piece(shape, queries, *piece, to);
  }
}

// exp(v - base), 0 for -inf, NaN for NaN (which Highway's makes 0).
template <class D>
HWY_INLINE hn::Vec<D> exponential_of(D d, hn::Vec<D> v, hn::Vec<D> base) {
  const auto x = hn::Sub(v, base);
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, x));
}

template <class T>
using Scratch = hwy::AlignedFreeUniquePtr<T[]>;

// Highway's allocation gives null where there is no memory.
template <class T>
Scratch<T> aligned_scratch(size_t count) {
  Scratch<T> memory = hwy::AllocateAligned<T>(count);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace ds::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // guard per target
