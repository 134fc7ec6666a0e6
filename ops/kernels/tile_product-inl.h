// Products of small matrices in registers. Compiled once per instruction set.
#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "ops/kernels/sparse_attention_kernel.h"

#if defined(DS_OPS_KERNELS_TILE_PRODUCT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DS_OPS_KERNELS_TILE_PRODUCT_INL_H_
#undef DS_OPS_KERNELS_TILE_PRODUCT_INL_H_
#else
#define DS_OPS_KERNELS_TILE_PRODUCT_INL_H_
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

}  // namespace ds::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // guard per target
