// The rules of optim/kernels for one element at a time: for kernels of a device and for what stands for them on the
// host. Operation by operation those of the vector kernels, with the same fused multiply-adds, so that both give the
// same bits. To be compiled without fused multiply-adds of the compiler's own. Torch-free; a compiler of kernels reads
// it.
//
// A rule is called as rule(master, gradient, states) -> new master; it changes the kStates states. The gradient is
// multiplied by its scale already.
#pragma once

#include <cmath>

#include "core/numbers/float_bits.h"
#include "optim/kernels/adagrad_kernel.h"
#include "optim/kernels/adam_kernel.h"
#include "optim/kernels/lion_kernel.h"
#include "optim/kernels/sgd_coefficients.h"

namespace ds::optimizers {

template <bool kAmsgrad>
class AdamElement {
 public:
  static constexpr int kStates = kAmsgrad ? 3 : 2;
  using Coefficients = AdamCoefficients;
  DS_HOST_DEVICE explicit AdamElement(const AdamCoefficients& c)
      : c_(c), blend_(c.gradient_share < 0.5F ? c.gradient_share : c.gradient_share - 1.0F) {}

  DS_HOST_DEVICE float operator()(float w, float g, float* states) const {
    if (c_.l2 != 0.0F) g = fmaf(c_.l2, w, g);
    const float mean = states[0];
    const float m = fmaf(blend_, g - mean, c_.gradient_share >= 0.5F ? g : mean);
    float v = states[1] * c_.beta2;
    v = fmaf(c_.square_share * g, g, v);
    states[0] = m;
    states[1] = v;
    if (kAmsgrad) {
      if (v < states[2]) v = states[2];  // a NaN in v stays
      states[2] = v;
    }
    const float step = c_.step_size * m / (sqrtf(v) + c_.eps);
    return w * c_.master_decay - step;
  }

 private:
  AdamCoefficients c_;
  float blend_;
};

class LionElement {
 public:
  static constexpr int kStates = 1;
  using Coefficients = LionCoefficients;
  DS_HOST_DEVICE explicit LionElement(const LionCoefficients& c) : c_(c) {}

  DS_HOST_DEVICE float operator()(float w, float g, float* states) const {
    const float m = states[0];
    const float blend = fmaf(g, c_.share1, m * c_.beta1);
    states[0] = fmaf(g, c_.share2, m * c_.beta2);
    const float step = fabsf(blend) > 0.0F ? copysignf(c_.lr, blend) : blend;  // elsewhere 0 or NaN
    return w * c_.master_decay - step;
  }

 private:
  LionCoefficients c_;
};

class AdagradElement {
 public:
  static constexpr int kStates = 1;
  using Coefficients = AdagradCoefficients;
  DS_HOST_DEVICE explicit AdagradElement(const AdagradCoefficients& c) : c_(c) {}

  DS_HOST_DEVICE float operator()(float w, float g, float* states) const {
    if (c_.l2 != 0.0F) g = fmaf(c_.l2, w, g);
    const float sum = fmaf(g, g, states[0]);
    states[0] = sum;
    return w - c_.step_size * g / (sqrtf(sum) + c_.eps);
  }

 private:
  AdagradCoefficients c_;
};

template <bool kMomentum>
class SgdElement {
 public:
  static constexpr int kStates = kMomentum ? 1 : 0;
  using Coefficients = SgdCoefficients;
  DS_HOST_DEVICE explicit SgdElement(const SgdCoefficients& c) : c_(c) {}

  DS_HOST_DEVICE float operator()(float w, float g, float* states) const {
    if (c_.l2 != 0.0F) g = fmaf(c_.l2, w, g);
    if (kMomentum) {
      const float buffer = c_.first ? g : fmaf(c_.share, g, states[0] * c_.momentum);
      states[0] = buffer;
      g = c_.nesterov ? fmaf(c_.momentum, buffer, g) : buffer;
    }
    return fmaf(-c_.lr, g, w);
  }

 private:
  SgdCoefficients c_;
};

}  // namespace ds::optimizers
