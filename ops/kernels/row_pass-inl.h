// Passes over the elements of a row, in whole vectors and a short last one. Compiled once per instruction set.
#include <hwy/highway.h>

#include <cstddef>
#include <cstring>
#include <type_traits>

#include "core/numbers/float_formats-inl.h"
#include "ops/kernels/float_type.h"

#if defined(DS_OPS_KERNELS_ROW_PASS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DS_OPS_KERNELS_ROW_PASS_INL_H_
#undef DS_OPS_KERNELS_ROW_PASS_INL_H_
#else
#define DS_OPS_KERNELS_ROW_PASS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace ds::ops::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using ds::HWY_NAMESPACE::BFloat16;
using ds::HWY_NAMESPACE::Float32;
using ds::HWY_NAMESPACE::Float64;

template <class Format>
using Tag = hn::ScalableTag<typename Format::Lane>;
template <class Format>
using Vector = hn::Vec<Tag<Format>>;
// A format in registers: what weights, tables and statistics are kept in.
template <class Format>
using Wide = std::conditional_t<std::is_same_v<typename Format::Lane, double>, Float64, Float32>;

// How many elements of a vector are meant: all, or the first `count`. Loads fill the others with zeros.
struct Whole {
  template <class Format>
  static HWY_INLINE Vector<Format> load(const typename Format::Raw* from) {
    return Format::load(Tag<Format>(), from);
  }
  template <class Format>
  static HWY_INLINE void store(Vector<Format> v, typename Format::Raw* to) {
    hn::StoreU(Format::encode(Tag<Format>(), v), hn::Rebind<typename Format::Raw, Tag<Format>>(), to);
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> keep(D /*d*/, hn::Vec<D> v) {
    return v;
  }
};

struct First {
  size_t count;

  template <class Format>
  HWY_INLINE Vector<Format> load(const typename Format::Raw* from) const {
    HWY_ALIGN typename Format::Raw padded[HWY_MAX_BYTES / sizeof(typename Format::Lane)] = {};
    std::memcpy(padded, from, count * sizeof(padded[0]));
    return Whole::load<Format>(padded);
  }
  template <class Format>
  HWY_INLINE void store(Vector<Format> v, typename Format::Raw* to) const {
    HWY_ALIGN typename Format::Raw padded[HWY_MAX_BYTES / sizeof(typename Format::Lane)];
    Whole::store<Format>(v, padded);
    std::memcpy(to, padded, count * sizeof(padded[0]));
  }
  // Zeros in the place of what is not meant.
  template <class D>
  HWY_INLINE hn::Vec<D> keep(D d, hn::Vec<D> v) const {
    return hn::IfThenElseZero(hn::FirstN(d, count), v);
  }
};

// step(i, k, part) for the vectors at i = 0, lanes, 2 lanes, ...; `k`, a constant below kSums, says which of several
// sums to add to, for additions that need not wait for one another.
constexpr size_t kSums = 4;

template <class Step>
HWY_INLINE void for_vectors(size_t size, size_t lanes, const Step& step) {
  size_t i = 0;
  for (; i + kSums * lanes <= size; i += kSums * lanes) {
    step(i, std::integral_constant<size_t, 0>(), Whole());
    step(i + lanes, std::integral_constant<size_t, 1>(), Whole());
    step(i + 2 * lanes, std::integral_constant<size_t, 2>(), Whole());
    step(i + 3 * lanes, std::integral_constant<size_t, 3>(), Whole());
  }
  for (; i + lanes <= size; i += lanes) step(i, std::integral_constant<size_t, 0>(), Whole());
  if (i < size) step(i, std::integral_constant<size_t, 1>(), First{size - i});
}

template <class D>
struct Sums {
  // Written out: a constructor of the compiler's own has no instruction set.
  HWY_INLINE Sums() {
    for (hn::Vec<D>& part : parts) part = hn::Zero(D());
  }

  hn::Vec<D> parts[kSums];

  HWY_INLINE hn::TFromD<D> total() const {
    const D d;
    return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(parts[0], parts[1]), hn::Add(parts[2], parts[3]))));
  }
};

// Calls run(Format()) for the format of `type`.
template <class Run>
HWY_INLINE void with_format(FloatType type, const Run& run) {
  switch (type) {
    case FloatType::kFloat32:
      return run(Float32());
    case FloatType::kBFloat16:
      return run(BFloat16());
    case FloatType::kFloat64:
      return run(Float64());
    case FloatType::kFloat16:
      HWY_ABORT("the vector kernels of operators have no float16");
  }
}

}  // namespace ds::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // guard per target
