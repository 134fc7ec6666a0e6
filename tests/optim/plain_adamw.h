// AdamW of one element in plain code, as docs/offload.md states it: float32, each operation rounded once.
#pragma once

#include <cmath>
#include <cstdint>

namespace ds::optimizers {

struct PlainAdamW {
  double lr = 1e-3;
  double weight_decay = 0.0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;

  // Step `count`, from 1. Changes w, m and v.
  void step(int64_t count, float g, float& w, float& m, float& v) const {
    const double correction1 = 1 - std::pow(beta1, count);
    const double correction2 = std::sqrt(1 - std::pow(beta2, count));
    m = std::fma(static_cast<float>(1 - beta1), g - m, m);
    v = std::fma(static_cast<float>(1 - beta2) * g, g, v * static_cast<float>(beta2));
    const float size = static_cast<float>(lr * correction2 / correction1);
    const float moved = size * m / (std::sqrt(v) + static_cast<float>(eps * correction2));
    w = w * static_cast<float>(1 - lr * weight_decay) - moved;
  }
};

}  // namespace ds::optimizers
