#include "ops/kernels/norm_kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/kernels/norm_kernel.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "ops/kernels/row_pass-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::ops::HWY_NAMESPACE {

// A row of an array, or null where there is no array.
template <class T>
HWY_INLINE const T* row_of(const void* array, int64_t row, size_t size) {
  return array == nullptr ? nullptr : static_cast<const T*>(array) + static_cast<size_t>(row) * size;
}
template <class T>
HWY_INLINE T* row_of(void* array, int64_t row, size_t size) {
  return array == nullptr ? nullptr : static_cast<T*>(array) + static_cast<size_t>(row) * size;
}

// The rows of one call; `kCentered`: LayerNorm.
template <class Format, bool kCentered>
class ForwardRows {
  using D = Tag<Format>;
  using T = typename Format::Lane;
  using Raw = typename Format::Raw;

 public:
  explicit ForwardRows(const NormForward& norm)
      : norm_(norm),
        size_(static_cast<size_t>(norm.size)),
        lanes_(hn::Lanes(D())),
        weight_(static_cast<const T*>(norm.weight)),
        bias_(static_cast<const T*>(norm.bias)) {}

  void run(int64_t row) const {
    const Raw* x = row_of<Raw>(norm_.input, row, size_);
    if (norm_.residual != nullptr) {
      Raw* const sum = row_of<Raw>(norm_.sum, row, size_);
      add(x, row_of<Raw>(norm_.residual, row, size_), sum);
      x = sum;
    }
    const T count = static_cast<T>(norm_.size);
    T mean = 0;
    if constexpr (kCentered) {
      mean = sum_of(x) / count;
      static_cast<T*>(norm_.mean)[row] = mean;
    }
    const T rstd = T{1} / std::sqrt(square_sum(x, mean) / count + static_cast<T>(norm_.eps));
    static_cast<T*>(norm_.rstd)[row] = rstd;
    write(x, mean, rstd, row_of<Raw>(norm_.output, row, size_));
  }

 private:
  void add(const Raw* a, const Raw* b, Raw* sum) const {
    for_vectors(size_, lanes_, [=](size_t i, auto /*k*/, auto part) HWY_ATTR {
      part.template store<Format>(hn::Add(part.template load<Format>(a + i), part.template load<Format>(b + i)),
                                  sum + i);
    });
  }

  T sum_of(const Raw* x) const {
    Sums<D> sums;
    for_vectors(size_, lanes_, [&](size_t i, auto k, auto part) HWY_ATTR {
      sums.parts[k] = hn::Add(sums.parts[k], part.template load<Format>(x + i));
    });
    return sums.total();
  }

  T square_sum(const Raw* x, T mean) const {
    const D d;
    Sums<D> sums;
    const auto center = hn::Set(d, mean);
    for_vectors(size_, lanes_, [&](size_t i, auto k, auto part) HWY_ATTR {
      auto v = part.template load<Format>(x + i);
      if constexpr (kCentered) v = part.keep(d, hn::Sub(v, center));
      sums.parts[k] = hn::MulAdd(v, v, sums.parts[k]);
    });
    return sums.total();
  }

  void write(const Raw* x, T mean, T rstd, Raw* output) const {
    const D d;
    const auto center = hn::Set(d, mean);
    const auto scale = hn::Set(d, rstd);
    const T* const weight = weight_;
    const T* const bias = bias_;
    for_vectors(size_, lanes_, [=](size_t i, auto /*k*/, auto part) HWY_ATTR {
      auto v = part.template load<Format>(x + i);
      if constexpr (kCentered) v = hn::Sub(v, center);
      v = hn::Mul(v, scale);
      if (weight != nullptr) v = hn::Mul(v, part.template load<Wide<Format>>(weight + i));
      if (bias != nullptr) v = hn::Add(v, part.template load<Wide<Format>>(bias + i));
      part.template store<Format>(v, output + i);
    });
  }

  const NormForward& norm_;
  size_t size_, lanes_;
  const T* weight_;
  const T* bias_;
};

template <class Format, bool kCentered>
class BackwardRows {
  using D = Tag<Format>;
  using T = typename Format::Lane;
  using Raw = typename Format::Raw;

 public:
  explicit BackwardRows(const NormBackward& norm)
      : norm_(norm),
        size_(static_cast<size_t>(norm.size)),
        lanes_(hn::Lanes(D())),
        weight_(static_cast<const T*>(norm.weight)),
        weight_gradient_(static_cast<T*>(norm.weight_gradient)),
        bias_gradient_(static_cast<T*>(norm.bias_gradient)) {}

  // With g = dy weight and n = (s - mean) rstd: ds = rstd (g - mean(g) - n mean(g n)), LayerNorm's; RMSNorm has no
  // mean(g).
  void run(int64_t row) const {
    const Raw* const dy = row_of<Raw>(norm_.output_gradient, row, size_);
    const Raw* const x = row_of<Raw>(norm_.input, row, size_);
    const T mean = kCentered ? static_cast<const T*>(norm_.mean)[row] : T{0};
    const T rstd = static_cast<const T*>(norm_.rstd)[row];
    Sums<D> of_g;
    Sums<D> of_gn;
    sum(dy, x, mean, of_g, of_gn);
    const T count = static_cast<T>(norm_.size);
    const T g_share = kCentered ? of_g.total() / count : T{0};
    const T n_share = of_gn.total() * rstd / count;
    write(row, {mean, rstd, g_share, n_share});
  }

 private:
  struct Row {
    T mean, rstd, g_share, n_share;
  };

  void sum(const Raw* dy, const Raw* x, T mean, Sums<D>& of_g, Sums<D>& of_gn) const {
    const auto center = hn::Set(D(), mean);
    const T* const weight = weight_;
    for_vectors(size_, lanes_, [&](size_t i, auto k, auto part) HWY_ATTR {
      auto g = part.template load<Format>(dy + i);  // zeros beyond the end
      if (weight != nullptr) g = hn::Mul(g, part.template load<Wide<Format>>(weight + i));
      auto v = part.template load<Format>(x + i);
      if constexpr (kCentered) {
        v = hn::Sub(v, center);
        of_g.parts[k] = hn::Add(of_g.parts[k], g);
      }
      of_gn.parts[k] = hn::MulAdd(g, v, of_gn.parts[k]);
    });
  }

  void write(int64_t row, const Row& of) const {
    const D d;
    const Raw* const dy = row_of<Raw>(norm_.output_gradient, row, size_);
    const Raw* const more = row_of<Raw>(norm_.sum_gradient, row, size_);
    const Raw* const x = row_of<Raw>(norm_.input, row, size_);
    Raw* const dx = row_of<Raw>(norm_.input_gradient, row, size_);
    const auto center = hn::Set(d, of.mean);
    const auto scale = hn::Set(d, of.rstd);
    const auto g_share = hn::Set(d, of.g_share);
    const auto n_share = hn::Set(d, of.n_share);
    const T* const weight = weight_;
    T* const dw = weight_gradient_;
    T* const db = bias_gradient_;
    for_vectors(size_, lanes_, [=](size_t i, auto /*k*/, auto part) HWY_ATTR {
      const auto up = part.template load<Format>(dy + i);
      auto n = part.template load<Format>(x + i);
      if constexpr (kCentered) n = hn::Sub(n, center);
      n = hn::Mul(n, scale);
      auto g = up;
      if (weight != nullptr) g = hn::Mul(g, part.template load<Wide<Format>>(weight + i));
      if constexpr (kCentered) g = hn::Sub(g, g_share);
      auto result = hn::Mul(scale, hn::NegMulAdd(n, n_share, g));
      if (more != nullptr) result = hn::Add(result, part.template load<Format>(more + i));
      part.template store<Format>(result, dx + i);
      if (dw != nullptr) {
        const auto before = part.template load<Wide<Format>>(dw + i);
        part.template store<Wide<Format>>(hn::MulAdd(up, n, before), dw + i);
      }
      if (db != nullptr) {
        part.template store<Wide<Format>>(hn::Add(part.template load<Wide<Format>>(db + i), up), db + i);
      }
    });
  }

  const NormBackward& norm_;
  size_t size_, lanes_;
  const T* weight_;
  T* weight_gradient_;
  T* bias_gradient_;
};

template <class Rows>
void run_rows(const Rows& rows, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) rows.run(row);
}

void norm_forward_pass(const NormForward& norm, int64_t begin, int64_t end) {
  with_format(norm.type, [&](auto format) HWY_ATTR {
    using Format = decltype(format);
    if (norm.mean != nullptr) {
      run_rows(ForwardRows<Format, true>(norm), begin, end);
    } else {
      run_rows(ForwardRows<Format, false>(norm), begin, end);
    }
  });
}

void norm_backward_pass(const NormBackward& norm, int64_t begin, int64_t end) {
  with_format(norm.type, [&](auto format) HWY_ATTR {
    using Format = decltype(format);
    if (norm.mean != nullptr) {
      run_rows(BackwardRows<Format, true>(norm), begin, end);
    } else {
      run_rows(BackwardRows<Format, false>(norm), begin, end);
    }
  });
}

}  // namespace ds::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ds::ops {

HWY_EXPORT(norm_forward_pass);
HWY_EXPORT(norm_backward_pass);

void norm_forward(const NormForward& norm, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(norm_forward_pass)(norm, begin, end);
}

void norm_backward(const NormBackward& norm, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(norm_backward_pass)(norm, begin, end);
}

}  // namespace ds::ops
#endif  // HWY_ONCE
