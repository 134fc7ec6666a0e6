#include "ops/kernels/rope_kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/kernels/rope_kernel.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ops/kernels/row_pass-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::ops::HWY_NAMESPACE {

template <class V>
struct Rotated {
  V first, second;
};

template <class V>
HWY_INLINE Rotated<V> rotate(V a, V b, V c, V s) {
  return {hn::NegMulAdd(b, s, hn::Mul(a, c)), hn::MulAdd(a, s, hn::Mul(b, c))};
}

template <class Format>
struct Angles {
  const typename Format::Lane* cos;
  const typename Format::Lane* sin;
  bool backward;

  template <class Part>
  HWY_INLINE Vector<Format> sine(size_t i, Part part) const {
    const auto s = part.template load<Wide<Format>>(sin + i);
    return backward ? hn::Neg(s) : s;
  }
};

// Pairs of channels that lie `pairs` apart.
template <class Format>
void rotate_halves(const typename Format::Raw* x, typename Format::Raw* y, size_t pairs, const Angles<Format>& angles) {
  for_vectors(pairs, hn::Lanes(Tag<Format>()), [=](size_t i, auto /*k*/, auto part) HWY_ATTR {
    const auto turned = rotate(part.template load<Format>(x + i), part.template load<Format>(x + pairs + i),
                               part.template load<Wide<Format>>(angles.cos + i), angles.sine(i, part));
    part.template store<Format>(turned.first, y + i);
    part.template store<Format>(turned.second, y + pairs + i);
  });
}

// The vectors of even and of odd elements among 2 `lanes` of them at `from`, and back.
template <class Format>
HWY_INLINE Rotated<Vector<Format>> load_pairs(const typename Format::Raw* from) {
  using Raw = typename Format::Raw;
  const hn::Rebind<Raw, Tag<Format>> raw;
  hn::Vec<decltype(raw)> even, odd;
  hn::LoadInterleaved2(raw, from, even, odd);
  HWY_ALIGN Raw parts[2][HWY_MAX_BYTES / sizeof(typename Format::Lane)];
  if constexpr (std::is_same_v<Raw, typename Format::Lane>) {
    return {even, odd};
  } else {
    hn::Store(even, raw, parts[0]);
    hn::Store(odd, raw, parts[1]);
    return {Whole::load<Format>(parts[0]), Whole::load<Format>(parts[1])};
  }
}

template <class Format>
HWY_INLINE void store_pairs(const Rotated<Vector<Format>>& pairs, typename Format::Raw* to) {
  const Tag<Format> d;
  const hn::Rebind<typename Format::Raw, Tag<Format>> raw;
  hn::StoreInterleaved2(Format::encode(d, pairs.first), Format::encode(d, pairs.second), raw, to);
}

// Pairs of neighbours.
template <class Format>
void rotate_neighbours(const typename Format::Raw* x, typename Format::Raw* y, size_t pairs,
                       const Angles<Format>& angles) {
  using Raw = typename Format::Raw;
  const size_t lanes = hn::Lanes(Tag<Format>());
  size_t i = 0;
  for (; i + lanes <= pairs; i += lanes) {
    const auto both = load_pairs<Format>(x + 2 * i);
    store_pairs<Format>(
        rotate(both.first, both.second, Whole::load<Wide<Format>>(angles.cos + i), angles.sine(i, Whole())), y + 2 * i);
  }
  if (i == pairs) return;
  const First part{pairs - i};
  HWY_ALIGN Raw padded[size_t{2} * HWY_MAX_BYTES / sizeof(typename Format::Lane)] = {};
  std::memcpy(padded, x + 2 * i, 2 * part.count * sizeof(Raw));
  const auto both = load_pairs<Format>(padded);
  store_pairs<Format>(rotate(both.first, both.second, part.load<Wide<Format>>(angles.cos + i), angles.sine(i, part)),
                      padded);
  std::memcpy(y + 2 * i, padded, 2 * part.count * sizeof(Raw));
}

template <class Format>
void rope_of(const RopeRows& rows, int64_t begin, int64_t end) {
  using Raw = typename Format::Raw;
  using T = typename Format::Lane;
  const auto pairs = static_cast<size_t>(rows.pairs);
  const auto rest = static_cast<size_t>(rows.channels) - 2 * pairs;
  for (int64_t row = begin; row < end; ++row) {
    const RopePlace place = place_of(rows, row);
    const auto* x = static_cast<const Raw*>(rows.input) + place.input;
    auto* y = static_cast<Raw*>(rows.output) + place.output;
    const size_t position = static_cast<size_t>(place.position) * pairs;
    const Angles<Format> angles{static_cast<const T*>(rows.cos) + position, static_cast<const T*>(rows.sin) + position,
                                rows.backward};
    if (rows.interleaved) {
      rotate_neighbours<Format>(x, y, pairs, angles);
    } else {
      rotate_halves<Format>(x, y, pairs, angles);
    }
    if (rest > 0) std::memcpy(y + 2 * pairs, x + 2 * pairs, rest * sizeof(Raw));
  }
}

void rope_pass(const RopeRows& rows, int64_t begin, int64_t end) {
  with_format(rows.type, [&](auto format) HWY_ATTR { rope_of<decltype(format)>(rows, begin, end); });
}

}  // namespace ds::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ds::ops {

HWY_EXPORT(rope_pass);

void rope_rows(const RopeRows& rows, int64_t begin, int64_t end) { HWY_DYNAMIC_DISPATCH(rope_pass)(rows, begin, end); }

}  // namespace ds::ops
#endif  // HWY_ONCE
