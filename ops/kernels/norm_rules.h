// LayerNorm and RMSNorm of one row by a team (row_rules.h); arrays and formulas are those of norm_kernel.h.
#pragma once

#include <cstdint>

#include "ops/kernels/norm_kernel.h"
#include "ops/kernels/row_rules.h"

namespace ds::ops {

template <class Format, bool kCentered, int kPack>
class NormForwardRule {
  using T = WideOf<Format>;
  using Values = Pack<T, kPack>;

 public:
  DS_HOST_DEVICE explicit NormForwardRule(const NormForward& norm) : norm_(norm), packs_(norm.size / kPack) {}

  template <class Team>
  DS_HOST_DEVICE void operator()(int64_t row, const Team& team) const {
    const void* x = row_at<Format>(norm_.input, row, norm_.size);
    if (norm_.residual != nullptr) x = add(x, row, team);
    const T count = static_cast<T>(norm_.size);
    T mean = 0;
    if constexpr (kCentered) {
      mean = team.sum(packs_, T(0), [=](int64_t i, T part) {
        const Values v = load_pack<Format, kPack>(x, i);
        for (int e = 0; e < kPack; ++e) part += v.of[e];
        return part;
      }) / count;
    }
    const T squares = team.sum(packs_, T(0), [=](int64_t i, T part) {
      const Values v = load_pack<Format, kPack>(x, i);
      for (int e = 0; e < kPack; ++e) part = multiply_add(v.of[e] - mean, v.of[e] - mean, part);
      return part;
    });
    const T rstd = T(1) / root_of(squares / count + static_cast<T>(norm_.eps));
    T* const means = static_cast<T*>(norm_.mean);
    T* const rstds = static_cast<T*>(norm_.rstd);
    team.each(1, [=](int64_t) {
      if (kCentered) means[row] = mean;
      rstds[row] = rstd;
    });
    write(x, mean, rstd, row, team);
  }

 private:
  // Returns the sum, rounded, which each lane reads where it has written it.
  template <class Team>
  DS_HOST_DEVICE const void* add(const void* x, int64_t row, const Team& team) const {
    const void* const residual = row_at<Format>(norm_.residual, row, norm_.size);
    void* const sum = row_at<Format>(norm_.sum, row, norm_.size);
    team.each(packs_, [=](int64_t i) {
      Values v = load_pack<Format, kPack>(x, i);
      const Values more = load_pack<Format, kPack>(residual, i);
      for (int e = 0; e < kPack; ++e) v.of[e] += more.of[e];
      store_pack<Format, kPack>(sum, i, v);
    });
    return sum;
  }

  template <class Team>
  DS_HOST_DEVICE void write(const void* x, T mean, T rstd, int64_t row, const Team& team) const {
    void* const output = row_at<Format>(norm_.output, row, norm_.size);
    const void* const weight = norm_.weight;
    const void* const bias = norm_.bias;
    team.each(packs_, [=](int64_t i) {
      Values v = load_pack<Format, kPack>(x, i);
      for (int e = 0; e < kPack; ++e) v.of[e] = (v.of[e] - mean) * rstd;
      if (weight != nullptr) {
        const Values w = load_pack<WideBits<T>, kPack>(weight, i);
        for (int e = 0; e < kPack; ++e) v.of[e] *= w.of[e];
      }
      if (bias != nullptr) {
        const Values b = load_pack<WideBits<T>, kPack>(bias, i);
        for (int e = 0; e < kPack; ++e) v.of[e] += b.of[e];
      }
      store_pack<Format, kPack>(output, i, v);
    });
  }

  const NormForward& norm_;
  int64_t packs_;
};

// Adds to the gradients of weight and bias, element i of them on lane i / kPack % lanes.
template <class Format, bool kCentered, int kPack>
class NormBackwardRule {
  using T = WideOf<Format>;
  using Values = Pack<T, kPack>;

 public:
  DS_HOST_DEVICE explicit NormBackwardRule(const NormBackward& norm) : norm_(norm), packs_(norm.size / kPack) {}

  template <class Team>
  DS_HOST_DEVICE void operator()(int64_t row, const Team& team) const {
    const void* const dy = row_at<Format>(norm_.output_gradient, row, norm_.size);
    const void* const x = row_at<Format>(norm_.input, row, norm_.size);
    const void* const weight = norm_.weight;
    const T mean = kCentered ? static_cast<const T*>(norm_.mean)[row] : T(0);
    const T rstd = static_cast<const T*>(norm_.rstd)[row];
    const TwoSums<T> sums = team.sum(packs_, TwoSums<T>{0, 0}, [=](int64_t i, TwoSums<T> part) {
      const Values g = weighted(load_pack<Format, kPack>(dy, i), weight, i);
      const Values v = load_pack<Format, kPack>(x, i);
      for (int e = 0; e < kPack; ++e) {
        part.first += g.of[e];
        part.second = multiply_add(g.of[e], v.of[e] - mean, part.second);
      }
      return part;
    });
    const T count = static_cast<T>(norm_.size);
    write(row, {mean, rstd, kCentered ? sums.first / count : T(0), sums.second * rstd / count}, team);
  }

 private:
  struct Row {
    T mean, rstd, g_share, n_share;
  };

  DS_HOST_DEVICE static Values weighted(Values g, const void* weight, int64_t i) {
    if (weight == nullptr) return g;
    const Values w = load_pack<WideBits<T>, kPack>(weight, i);
    for (int e = 0; e < kPack; ++e) g.of[e] *= w.of[e];
    return g;
  }

  template <class Team>
  DS_HOST_DEVICE void write(int64_t row, const Row& of, const Team& team) const {
    const void* const dy = row_at<Format>(norm_.output_gradient, row, norm_.size);
    const void* const x = row_at<Format>(norm_.input, row, norm_.size);
    const void* const more = row_at<Format>(norm_.sum_gradient, row, norm_.size);
    void* const dx = row_at<Format>(norm_.input_gradient, row, norm_.size);
    const NormBackward& norm = norm_;
    team.each(packs_, [&, dy, x, more, dx](int64_t i) {
      const Values up = load_pack<Format, kPack>(dy, i);
      const Values g = weighted(up, norm.weight, i);
      Values n = load_pack<Format, kPack>(x, i);
      Values result;
      for (int e = 0; e < kPack; ++e) {
        n.of[e] = (n.of[e] - of.mean) * of.rstd;
        result.of[e] = of.rstd * multiply_add(-n.of[e], of.n_share, g.of[e] - of.g_share);
      }
      if (more != nullptr) {
        const Values added = load_pack<Format, kPack>(more, i);
        for (int e = 0; e < kPack; ++e) result.of[e] += added.of[e];
      }
      store_pack<Format, kPack>(dx, i, result);
      if (norm.weight_gradient != nullptr) {
        Values sum = load_pack<WideBits<T>, kPack>(norm.weight_gradient, i);
        for (int e = 0; e < kPack; ++e) sum.of[e] = multiply_add(up.of[e], n.of[e], sum.of[e]);
        store_pack<WideBits<T>, kPack>(norm.weight_gradient, i, sum);
      }
      if (norm.bias_gradient != nullptr) {
        Values sum = load_pack<WideBits<T>, kPack>(norm.bias_gradient, i);
        for (int e = 0; e < kPack; ++e) sum.of[e] += up.of[e];
        store_pack<WideBits<T>, kPack>(norm.bias_gradient, i, sum);
      }
    });
  }

  const NormBackward& norm_;
  int64_t packs_;
};

}  // namespace ds::ops
