// LAMB (optim/lamb.h) for one element at a time, in two passes with sums over whole parameters between them: for
// kernels of a device and for what stands for them on the host. To be compiled without fused multiply-adds of the
// compiler's own. Torch-free; a compiler of kernels reads it.
#pragma once

#include <cmath>

#include "core/numbers/float_bits.h"

namespace ds::optimizers {

struct LambCoefficients {
  float beta1 = 0.9F;
  float gradient_share = 0.1F;  // 1 - beta1, rounded once
  float beta2 = 0.999F;
  float square_share = 0.001F;  // 1 - beta2
  float eps = 1e-8F;
  float weight_decay = 0.0F;
  bool eps_inside_sqrt = false;
  double step_size = 0.0;  // lr with the bias correction
  double min_coeff = 0.01;
  double max_coeff = 10.0;
};

class LambElement {
 public:
  DS_HOST_DEVICE explicit LambElement(const LambCoefficients& c) : c_(c) {}

  // First pass: moves the running means, states[0] and states[1], by a gradient that is scaled already.
  DS_HOST_DEVICE void advance(float g, float* states) const {
    states[0] = fmaf(c_.gradient_share, g, states[0] * c_.beta1);
    states[1] = fmaf(c_.square_share * g, g, states[1] * c_.beta2);
  }

  // Returns u, with the same bits in both passes.
  DS_HOST_DEVICE float direction(float w, const float* states) const {
    const float divisor = c_.eps_inside_sqrt ? sqrtf(states[1] + c_.eps) : sqrtf(states[1]) + c_.eps;
    const float u = states[0] / divisor;
    return c_.weight_decay == 0.0F ? u : fmaf(c_.weight_decay, w, u);
  }

 private:
  LambCoefficients c_;
};

// Returns the factor of u in the second pass: step size and trust coefficient, from the sums of squares of the
// parameter's weights and of its u, in this order.
DS_HOST_DEVICE inline float lamb_factor(const LambCoefficients& c, const double* squares) {
  double trust = 1.0;
  if (squares[0] != 0.0 && squares[1] != 0.0) {
    trust = sqrt(squares[0]) / sqrt(squares[1]);
    if (trust < c.min_coeff) trust = c.min_coeff;  // a NaN stays
    if (trust > c.max_coeff) trust = c.max_coeff;
  }
  return static_cast<float>(trust * c.step_size);
}

}  // namespace ds::optimizers
