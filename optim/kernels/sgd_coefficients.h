// SGD with momentum (as torch.optim.SGD):
//
//   g = g + l2 w      b = first ? g : momentum b + share g      g = nesterov ? g + momentum b : b      w = w - lr g
//
// Torch-free.
#pragma once

namespace ds::optimizers {

struct SgdCoefficients {
  float l2 = 0.0F;  // weight decay
  float lr = 1e-3F;
  float momentum = 0.0F;
  float share = 1.0F;  // 1 - dampening
  bool nesterov = false;
  bool first = false;  // the step that makes b
};

}  // namespace ds::optimizers
