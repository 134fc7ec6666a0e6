// 1-bit Adam and 1-bit LAMB after the freeze once more, for all ranks in one place: loops over plain arrays, from the
// formulas of the papers. What they share with the code under test is the steps before the freeze, which are AdamW's
// and LAMB's own and have tests of their own.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/compression/exchange_reference.h"

namespace ds::compression::reference {

struct Settings {
  float lr = 0.02F;
  double weight_decay = 0.1;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  int64_t freeze_step = 30;
  bool bias_correction = true;
};

inline float moved(float average, float gradient, double beta) {
  return average * static_cast<float>(beta) + gradient * static_cast<float>(1 - beta);
}

// m after the exchange of what all ranks made of it; 0 where there is no variance.
inline void exchange_average(Values& average, const Values& variance, const std::vector<Values>& gradients,
                             double beta1, Exchange& exchange) {
  std::vector<Values> own(gradients.size(), average);
  for (size_t rank = 0; rank < own.size(); ++rank) {
    for (size_t i = 0; i < average.size(); ++i) own[rank][i] = moved(average[i], gradients[rank][i], beta1);
  }
  average = exchange.mean(own);
  for (size_t i = 0; i < average.size(); ++i) {
    if (variance[i] == 0) average[i] = 0;
  }
}

inline float denominator(float variance, double correction, double eps) {
  return std::sqrt(variance) / static_cast<float>(std::sqrt(correction)) + static_cast<float>(eps);
}

// One step of 1-bit Adam after the freeze.
inline void frozen_adam(Values& weights, Values& average, const Values& variance, const std::vector<Values>& gradients,
                        int64_t step, const Settings& s, Exchange& exchange) {
  exchange_average(average, variance, gradients, s.beta1, exchange);
  const auto count = static_cast<double>(step);
  const double lr = s.lr;
  const double correction1 = s.bias_correction ? 1 - std::pow(s.beta1, count) : 1.0;
  const double correction2 = s.bias_correction ? 1 - std::pow(s.beta2, static_cast<double>(s.freeze_step)) : 1.0;
  const auto rate = static_cast<float>(lr / correction1);
  const auto keep = static_cast<float>(1 - lr * s.weight_decay);
  for (size_t i = 0; i < weights.size(); ++i) {
    weights[i] = weights[i] * keep - average[i] / denominator(variance[i], correction2, s.eps) * rate;
  }
}

struct LambSettings : Settings {
  double factor_max = 4.0;
  double factor_min = 0.5;
  double factor_threshold = 0.1;
};

// One step of 1-bit LAMB after the freeze. `coefficient` and `factor`: by parameter.
inline void frozen_lamb(const Layout& layout, Values& weights, Values& average, const Values& variance, Values& fresh,
                        const std::vector<double>& coefficient, std::vector<double>& factor,
                        const std::vector<Values>& gradients, int64_t step, const LambSettings& s, Exchange& exchange) {
  const Values before = average;
  exchange_average(average, variance, gradients, s.beta1, exchange);
  double step_size = s.lr;
  if (s.bias_correction) {
    step_size *= std::sqrt(1 - std::pow(s.beta2, static_cast<double>(s.freeze_step))) /
                 (1 - std::pow(s.beta1, static_cast<double>(step)));
  }
  for (size_t p = 0; p < layout.parameters.size(); ++p) {
    const auto [begin, end] = layout.parameters[p];
    double largest = 0;
    double direction_squares = 0;
    double update_squares = 0;
    Values update(static_cast<size_t>(end - begin));
    for (int64_t i = begin; i < end; ++i) {
      const float gradient = (average[i] - before[i] * static_cast<float>(s.beta1)) / static_cast<float>(1 - s.beta1);
      fresh[i] = fresh[i] * static_cast<float>(s.beta2) + gradient * gradient * static_cast<float>(1 - s.beta2);
      const float divisor = std::sqrt(variance[i]) + static_cast<float>(s.eps);
      largest = std::max(largest, static_cast<double>(divisor / (std::sqrt(fresh[i]) + static_cast<float>(s.eps))));
      const float direction = average[i] / divisor;
      const float whole = direction + weights[i] * static_cast<float>(s.weight_decay);
      direction_squares += static_cast<double>(direction) * direction;
      update_squares += static_cast<double>(whole) * whole;
      update[static_cast<size_t>(i - begin)] = whole;
    }
    if (s.weight_decay != 0) {
      const double share = std::min(1.0, std::sqrt(direction_squares / update_squares));
      largest = largest * share + (1 - share);
    }
    double now = std::clamp(largest, s.factor_min, s.factor_max);
    now = std::min(now, factor[p] * (1 + s.factor_threshold));
    now = std::max(now, factor[p] * (1 - s.factor_threshold));
    factor[p] = now;
    const double trust = (coefficient[p] == 0 ? 1.0 : coefficient[p]) * now;
    for (int64_t i = begin; i < end; ++i) {
      weights[i] -= update[static_cast<size_t>(i - begin)] * static_cast<float>(trust * step_size);
    }
  }
}

}  // namespace ds::compression::reference
