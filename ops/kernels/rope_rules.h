// The rotation of some pairs of channels (row_rules.h); arrays and formulas are those of rope_kernel.h.
#pragma once

#include <cstdint>

#include "ops/kernels/rope_kernel.h"
#include "ops/kernels/row_rules.h"

namespace ds::ops {

// A row is worked on in items: kPack pairs each, then the channels beyond them one by one.
DS_HOST_DEVICE inline int64_t rope_items(const RopeRows& rows, int pack) {
  return rows.pairs / pack + rows.channels - 2 * rows.pairs;
}

DS_HOST_DEVICE inline int64_t rope_row_count(const RopeRows& rows) {
  return rows.sizes[0] * rows.sizes[1] * rows.sizes[2];
}

template <class Format, int kPack>
class RopeRule {
  using T = WideOf<Format>;
  using Bits = typename Format::Bits;
  using Values = Pack<T, kPack>;

 public:
  DS_HOST_DEVICE RopeRule(const RopeRows& rows, int64_t row) : rows_(rows) {
    const RopePlace place = place_of(rows, row);
    x_ = static_cast<const Bits*>(rows.input) + place.input;
    y_ = static_cast<Bits*>(rows.output) + place.output;
    position_ = place.position;
  }

  DS_HOST_DEVICE void operator()(int64_t item) const {
    const int64_t packs = rows_.pairs / kPack;
    if (item >= packs) {
      const int64_t channel = 2 * rows_.pairs + item - packs;
      y_[channel] = x_[channel];
    } else if (rows_.interleaved) {
      turn_neighbours(item);
    } else {
      turn_halves(item);
    }
  }

 private:
  struct Angles {
    Values cos, sin;
  };

  DS_HOST_DEVICE Angles angles(int64_t item) const {
    Angles at{load_pack<WideBits<T>, kPack>(row_at<WideBits<T>>(rows_.cos, position_, rows_.pairs), item),
              load_pack<WideBits<T>, kPack>(row_at<WideBits<T>>(rows_.sin, position_, rows_.pairs), item)};
    if (rows_.backward) {
      for (int e = 0; e < kPack; ++e) at.sin.of[e] = -at.sin.of[e];
    }
    return at;
  }

  DS_HOST_DEVICE static void turn(T& a, T& b, T c, T s) {
    const T first = multiply_add(-b, s, a * c);
    b = multiply_add(a, s, b * c);
    a = first;
  }

  DS_HOST_DEVICE void turn_halves(int64_t item) const {
    Values a = load_pack<Format, kPack>(x_, item);
    Values b = load_pack<Format, kPack>(x_ + rows_.pairs, item);
    const Angles at = angles(item);
    for (int e = 0; e < kPack; ++e) turn(a.of[e], b.of[e], at.cos.of[e], at.sin.of[e]);
    store_pack<Format, kPack>(y_, item, a);
    store_pack<Format, kPack>(y_ + rows_.pairs, item, b);
  }

  DS_HOST_DEVICE void turn_neighbours(int64_t item) const {
    Pack<T, 2 * kPack> both;
    for (int half = 0; half < 2; ++half) {
      const Values part = load_pack<Format, kPack>(x_, 2 * item + half);
      for (int e = 0; e < kPack; ++e) both.of[half * kPack + e] = part.of[e];
    }
    const Angles at = angles(item);
    for (int e = 0; e < kPack; ++e) turn(both.of[2 * e], both.of[2 * e + 1], at.cos.of[e], at.sin.of[e]);
    for (int half = 0; half < 2; ++half) {
      Values part;
      for (int e = 0; e < kPack; ++e) part.of[e] = both.of[half * kPack + e];
      store_pack<Format, kPack>(y_, 2 * item + half, part);
    }
  }

  const RopeRows& rows_;
  const Bits* x_;
  Bits* y_;
  int64_t position_;
};

}  // namespace ds::ops
