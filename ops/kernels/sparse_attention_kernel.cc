#include "ops/kernels/sparse_attention_kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/kernels/sparse_attention_kernel.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

#include <cmath>

#include "ops/kernels/attention_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::ops::HWY_NAMESPACE {

// Queries of one block, softmax and output: what a row of tiles adds up.
template <class Format>
class ForwardRows {
  using T = typename Format::Lane;

 public:
  ForwardRows(const SparseAttentionShape& shape, const SparseAttentionForward& arrays)
      : shape_(shape),
        arrays_(arrays),
        size_(shape),
        queries_(aligned_scratch<T>(kMostRows * size_.padded_channels)),
        outputs_(aligned_scratch<T>(kMostRows * size_.padded_channels)),
        scores_(aligned_scratch<T>(kMostRows * kTileStride)) {}

  void run(int64_t unit) {
    const int64_t head = unit / shape_.blocks;  // of all batches
    const int64_t row_block = unit % shape_.blocks;
    const int64_t end = std::min(shape_.length, (row_block + 1) * shape_.block);
    for (int64_t first = row_block * shape_.block; first < end; first += kMostRows) {
      const QueryRows queries{head / shape_.heads, head % shape_.heads, first, std::min(kMostRows, end - first)};
      pieces_of(shape_, queries.head, row_block, first + queries.count - 1, pieces_);
      run_rows(queries, head);
    }
  }

 private:
  void run_rows(const QueryRows& queries, int64_t head) {
    const size_t packed = static_cast<size_t>(head) * static_cast<size_t>(shape_.packed_size());
    const T* const key_panels = static_cast<const T*>(arrays_.packed.key_panels) + packed;
    const T* const value_rows = static_cast<const T*>(arrays_.packed.value_rows) + packed;
    for (int64_t i = 0; i < queries.count; ++i) {
      widen_row<Format>(token_of<Format>(arrays_.query, queries.batch, queries.head, queries.first + i), size_.channels,
                        size_.padded_channels, static_cast<T>(shape_.scale), query_row(i));
      std::fill(output_row(i), output_row(i + 1), T{0});
      largest_[i] = -std::numeric_limits<T>::infinity();
      sums_[i] = T{0};
    }
    for_tiles(pieces_, [&](const KeyPiece* first, const KeyPiece* end, size_t columns) HWY_ATTR {
      score_tile(shape_, queries, queries_.get(), key_panels, PieceRange{first, end}, scores_.get());
      for (int64_t i = 0; i < queries.count; ++i) soften(i, columns);
      const T* from = scores_.get();
      for (const KeyPiece* piece = first; piece != end; from += piece->width, ++piece) {
        multiply<true>(LeftFactor<T>{from, kTileStride, 1}, size_.rows_at(value_rows, piece->start),
                       ProductSum<T>{outputs_.get(), size_.padded_channels}, static_cast<size_t>(queries.count),
                       size_.padded_channels, static_cast<size_t>(piece->valid));
      }
    });
    finish(queries, head);
  }

  // Scores of a row become weights; what was added up before is brought to the new largest score.
  void soften(int64_t i, size_t columns) {
    const PanelTag<T> d;
    const size_t lanes = hn::Lanes(d);
    T* const row = scores_.get() + i * kTileStride;
    auto most = hn::Set(d, largest_[i]);
    for (size_t j = 0; j < columns; j += lanes) most = hn::Max(most, hn::LoadU(d, row + j));
    const T largest = hn::GetLane(hn::MaxOfLanes(d, most));
    const T base = largest == -std::numeric_limits<T>::infinity() ? T{0} : largest;
    auto total = hn::Zero(d);
    for (size_t j = 0; j < columns; j += lanes) {
      const auto weight = exponential_of(d, hn::LoadU(d, row + j), hn::Set(d, base));
      total = hn::Add(total, weight);
      hn::StoreU(weight, d, row + j);
    }
    const T shrunk = std::exp(largest_[i] - base);
    sums_[i] = sums_[i] * shrunk + hn::GetLane(hn::SumOfLanes(d, total));
    if (largest != largest_[i]) {
      T* const output = output_row(i);
      for (size_t c = 0; c < size_.padded_channels; c += lanes) {
        hn::StoreU(hn::Mul(hn::LoadU(d, output + c), hn::Set(d, shrunk)), d, output + c);
      }
    }
    largest_[i] = largest;
  }

  void finish(const QueryRows& queries, int64_t head) {
    const int64_t at = head * shape_.length + queries.first;
    T* const largest = static_cast<T*>(arrays_.largest) + at;
    T* const log_of_sum = static_cast<T*>(arrays_.log_of_sum) + at;
    for (int64_t i = 0; i < queries.count; ++i) {
      const bool empty = sums_[i] == T{0};  // no key, or -inf for all
      narrow_row<Format>(output_row(i), size_.channels, empty ? T{0} : T{1} / sums_[i],
                         own_token_of<Format>(arrays_.output, queries.batch, queries.head, queries.first + i));
      largest[i] = empty ? T{0} : largest_[i];
      log_of_sum[i] = empty ? std::numeric_limits<T>::infinity() : std::log(sums_[i]);
    }
  }

  T* query_row(int64_t i) { return queries_.get() + static_cast<size_t>(i) * size_.padded_channels; }
  T* output_row(int64_t i) { return outputs_.get() + static_cast<size_t>(i) * size_.padded_channels; }

  const SparseAttentionShape& shape_;
  const SparseAttentionForward& arrays_;
  PackedSize size_;
  Scratch<T> queries_, outputs_, scores_;
  std::vector<KeyPiece> pieces_;
  T largest_[kMostRows], sums_[kMostRows];
};

template <class Format>
class BackwardHead {
  using T = typename Format::Lane;

 public:
  BackwardHead(const SparseAttentionShape& shape, const SparseAttentionBackward& arrays)
      : shape_(shape),
        arrays_(arrays),
        size_(shape),
        rows_(kMostRows * size_.padded_channels),
        packed_(static_cast<size_t>(shape.packed_size())),
        memory_(aligned_scratch<T>(5 * packed_)),
        queries_(aligned_scratch<T>(3 * rows_)),
        scores_(aligned_scratch<T>(2 * kMostRows * kTileStride)) {}

  void run(int64_t index) {
    const int64_t batch = index / shape_.heads;
    const int64_t head = index % shape_.heads;
    for (int64_t block = 0; block < shape_.blocks; ++block) {
      const auto at = static_cast<size_t>(block * size_.padded_block);
      // The block of value rows is scratch of the value panels.
      pack_block_rows<Format>(shape_, arrays_.value, batch, head, block, key_rows() + at * size_.padded_channels);
      rows_to_panels(size_, key_rows() + at * size_.padded_channels, value_panels() + at * size_.channels);
      pack_block_rows<Format>(shape_, arrays_.key, batch, head, block, key_rows() + at * size_.padded_channels);
      rows_to_panels(size_, key_rows() + at * size_.padded_channels, key_panels() + at * size_.channels);
    }
    std::fill(key_sums(), key_sums() + 2 * packed_, T{0});
    for (int64_t block = 0; block < shape_.blocks; ++block) {
      const int64_t end = std::min(shape_.length, (block + 1) * shape_.block);
      for (int64_t first = block * shape_.block; first < end; first += kMostRows) {
        const QueryRows queries{batch, head, first, std::min(kMostRows, end - first)};
        pieces_of(shape_, head, block, first + queries.count - 1, pieces_);
        run_rows(queries, index);
      }
    }
    write(arrays_.key_gradient, batch, head, key_sums());
    write(arrays_.value_gradient, batch, head, value_sums());
  }

 private:
  void run_rows(const QueryRows& queries, int64_t index) {
    read(queries, index);
    for_tiles(pieces_, [&](const KeyPiece* first, const KeyPiece* end, size_t columns) HWY_ATTR {
      score_tile(shape_, queries, scaled_queries(), key_panels(), PieceRange{first, end}, weights());
      T* to = changes();
      for (const KeyPiece* piece = first; piece != end; to += piece->width, ++piece) {
        multiply<false>(LeftFactor<T>{upstream(), size_.padded_channels, 1},
                        size_.panels_at(static_cast<const T*>(value_panels()), piece->start),
                        ProductSum<T>{to, kTileStride}, static_cast<size_t>(queries.count),
                        static_cast<size_t>(piece->width), size_.channels);
      }
      for (int64_t i = 0; i < queries.count; ++i) change_scores(i, columns);
      add_gradients(queries, first, end);
    });
    for (int64_t i = 0; i < queries.count; ++i) {
      narrow_row<Format>(query_sums() + row_at(i), size_.channels, static_cast<T>(shape_.scale),
                         own_token_of<Format>(arrays_.query_gradient, queries.batch, queries.head, queries.first + i));
    }
  }

  // Queries, gradients of their outputs, and the products of these with the outputs.
  void read(const QueryRows& queries, int64_t index) {
    const PanelTag<T> d;
    const size_t lanes = hn::Lanes(d);
    for (int64_t i = 0; i < queries.count; ++i) {
      const auto from = [&](const AttentionTensor& tensor) HWY_ATTR {
        return token_of<Format>(tensor, queries.batch, queries.head, queries.first + i);
      };
      T* const output = query_sums() + row_at(i);  // until it is cleared
      widen_row<Format>(from(arrays_.query), size_.channels, size_.padded_channels, static_cast<T>(shape_.scale),
                        scaled_queries() + row_at(i));
      widen_row<Format>(from(arrays_.output_gradient), size_.channels, size_.padded_channels, T{1},
                        upstream() + row_at(i));
      widen_row<Format>(from(arrays_.output), size_.channels, size_.padded_channels, T{1}, output);
      auto product = hn::Zero(d);
      for (size_t c = 0; c < size_.padded_channels; c += lanes) {
        product = hn::MulAdd(hn::LoadU(d, output + c), hn::LoadU(d, upstream() + row_at(i) + c), product);
      }
      products_[i] = hn::GetLane(hn::SumOfLanes(d, product));
      const int64_t at = index * shape_.length + queries.first + i;
      largest_[i] = static_cast<const T*>(arrays_.largest)[at];
      logs_of_sums_[i] = static_cast<const T*>(arrays_.log_of_sum)[at];
      std::fill(output, output + size_.padded_channels, T{0});
    }
  }

  // Scores become weights, gradients of weights those of scores.
  void change_scores(int64_t i, size_t columns) {
    const PanelTag<T> d;
    T* const weight = weights() + i * kTileStride;
    T* const change = changes() + i * kTileStride;
    const auto largest = hn::Set(d, largest_[i]);
    const auto log_of_sum = hn::Set(d, logs_of_sums_[i]);
    const auto product = hn::Set(d, products_[i]);
    for (size_t j = 0; j < columns; j += hn::Lanes(d)) {
      const auto p = exponential_of(d, hn::Sub(hn::LoadU(d, weight + j), largest), log_of_sum);
      hn::StoreU(p, d, weight + j);
      hn::StoreU(hn::Mul(p, hn::Sub(hn::LoadU(d, change + j), product)), d, change + j);
    }
  }

  void add_gradients(const QueryRows& queries, const KeyPiece* first, const KeyPiece* end) {
    const auto rows = static_cast<size_t>(queries.count);
    size_t at = 0;
    for (const KeyPiece* piece = first; piece != end; at += static_cast<size_t>(piece->width), ++piece) {
      const auto keys = static_cast<size_t>(piece->valid);
      const size_t own = static_cast<size_t>(piece->start) * size_.padded_channels;
      const auto sums = [&](T* of) HWY_ATTR { return ProductSum<T>{of, size_.padded_channels}; };
      const auto rows_of = [&](const T* of) HWY_ATTR { return size_.rows_at(of, 0); };
      multiply<true>(LeftFactor<T>{weights() + at, 1, kTileStride}, rows_of(upstream()), sums(value_sums() + own), keys,
                     size_.padded_channels, rows);
      multiply<true>(LeftFactor<T>{changes() + at, 1, kTileStride}, rows_of(scaled_queries()), sums(key_sums() + own),
                     keys, size_.padded_channels, rows);
      multiply<true>(LeftFactor<T>{changes() + at, kTileStride, 1}, rows_of(key_rows() + own), sums(query_sums()), rows,
                     size_.padded_channels, keys);
    }
  }

  void write(const AttentionTensor& gradient, int64_t batch, int64_t head, const T* sums) {
    for (int64_t token = 0; token < shape_.length; ++token) {
      const int64_t packed = token / size_.block * size_.padded_block + token % size_.block;
      narrow_row<Format>(sums + static_cast<size_t>(packed) * size_.padded_channels, size_.channels, T{1},
                         own_token_of<Format>(gradient, batch, head, token));
    }
  }

  T* key_panels() { return memory_.get(); }
  T* value_panels() { return memory_.get() + packed_; }
  T* key_rows() { return memory_.get() + 2 * packed_; }
  T* key_sums() { return memory_.get() + 3 * packed_; }
  T* value_sums() { return memory_.get() + 4 * packed_; }
  T* scaled_queries() { return queries_.get(); }
  T* upstream() { return queries_.get() + rows_; }
  T* query_sums() { return queries_.get() + 2 * rows_; }
  T* weights() { return scores_.get(); }
  T* changes() { return scores_.get() + kMostRows * kTileStride; }
  size_t row_at(int64_t i) const { return static_cast<size_t>(i) * size_.padded_channels; }

  const SparseAttentionShape& shape_;
  const SparseAttentionBackward& arrays_;
  PackedSize size_;
  size_t rows_, packed_;
  Scratch<T> memory_, queries_, scores_;
  std::vector<KeyPiece> pieces_;
  T products_[kMostRows], largest_[kMostRows], logs_of_sums_[kMostRows];
};

void pack_keys_pass(const SparseAttentionShape& shape, const AttentionTensor& key, const AttentionTensor& value,
                    const PackedKeys& packed, int64_t begin, int64_t end) {
  with_format(shape.type, [&](auto format) HWY_ATTR {
    using Format = decltype(format);
    using T = typename Format::Lane;
    const PackedSize size(shape);
    const Scratch<T> rows = aligned_scratch<T>(static_cast<size_t>(size.padded_block) * size.padded_channels);
    for (int64_t index = begin; index < end; ++index) {
      const size_t own = static_cast<size_t>(index) * static_cast<size_t>(shape.packed_size());
      for (int64_t block = 0; block < shape.blocks; ++block) {
        const auto at = static_cast<size_t>(block * size.padded_block);
        pack_block_rows<Format>(shape, key, index / shape.heads, index % shape.heads, block, rows.get());
        rows_to_panels(size, rows.get(), static_cast<T*>(packed.key_panels) + own + at * size.channels);
        pack_block_rows<Format>(shape, value, index / shape.heads, index % shape.heads, block,
                                static_cast<T*>(packed.value_rows) + own + at * size.padded_channels);
      }
    }
  });
}

void sparse_attention_forward_pass(const SparseAttentionShape& shape, const SparseAttentionForward& arrays,
                                   int64_t begin, int64_t end) {
  with_format(shape.type, [&](auto format) HWY_ATTR {
    ForwardRows<decltype(format)> rows(shape, arrays);
    for (int64_t unit = begin; unit < end; ++unit) rows.run(unit);
  });
}

void sparse_attention_backward_pass(const SparseAttentionShape& shape, const SparseAttentionBackward& arrays,
                                    int64_t begin, int64_t end) {
  with_format(shape.type, [&](auto format) HWY_ATTR {
    BackwardHead<decltype(format)> heads(shape, arrays);
    for (int64_t index = begin; index < end; ++index) heads.run(index);
  });
}

}  // namespace ds::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ds::ops {

HWY_EXPORT(pack_keys_pass);
HWY_EXPORT(sparse_attention_forward_pass);
HWY_EXPORT(sparse_attention_backward_pass);

void pack_keys(const SparseAttentionShape& shape, const AttentionTensor& key, const AttentionTensor& value,
               const PackedKeys& packed, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(pack_keys_pass)(shape, key, value, packed, begin, end);
}

void sparse_attention_forward(const SparseAttentionShape& shape, const SparseAttentionForward& arrays, int64_t begin,
                              int64_t end) {
  HWY_DYNAMIC_DISPATCH(sparse_attention_forward_pass)(shape, arrays, begin, end);
}

void sparse_attention_backward(const SparseAttentionShape& shape, const SparseAttentionBackward& arrays, int64_t begin,
                               int64_t end) {
  HWY_DYNAMIC_DISPATCH(sparse_attention_backward_pass)(shape, arrays, begin, end);
}

}  // namespace ds::ops
#endif  // HWY_ONCE
