// The computations of Muon (optim/muon.h) before and after it makes a matrix orthogonal, as rules of
// optim/kernels/element_rules.h. Torch-free; a compiler of kernels reads it.
#pragma once

#include <cmath>

#include "core/numbers/float_bits.h"

namespace ds::optimizers {

struct MuonBlendCoefficients {
  float momentum = 0.95F;
  float gradient_share = 0.05F;  // 1 - momentum, rounded once
};

struct MuonStepCoefficients {
  float lr = 0.0F;
  float master_decay = 1.0F;  // 1 - lr weight_decay
};

// LibTorch's lerp.
DS_HOST_DEVICE inline float blended(float from, float to, float share) {
  return share < 0.5F ? fmaf(share, to - from, from) : fmaf(share - 1.0F, to - from, to);
}

// The master is where the momentum goes that is made orthogonal; the state is the running momentum.
class MuonBlendElement {
 public:
  static constexpr int kStates = 1;
  using Coefficients = MuonBlendCoefficients;
  DS_HOST_DEVICE explicit MuonBlendElement(const MuonBlendCoefficients& c) : c_(c) {}

  DS_HOST_DEVICE float operator()(float /*before*/, float g, float* states) const {
    states[0] = blended(states[0], g, c_.gradient_share);
    return blended(g, states[0], c_.momentum);
  }

 private:
  MuonBlendCoefficients c_;
};

// The gradient is the orthogonal step.
class MuonStepElement {
 public:
  static constexpr int kStates = 0;
  using Coefficients = MuonStepCoefficients;
  DS_HOST_DEVICE explicit MuonStepElement(const MuonStepCoefficients& c) : c_(c) {}

  DS_HOST_DEVICE float operator()(float w, float step, float* /*states*/) const {
    return fmaf(-c_.lr, step, w * c_.master_decay);
  }

 private:
  MuonStepCoefficients c_;
};

}  // namespace ds::optimizers
