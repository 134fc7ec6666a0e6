// The hyper-parameters of one parameter group. Torch-free.
#pragma once

namespace ds::optimizers {

// May change from step to step. Fields an optimizer does not know are ignored by it. LR schedules write lr (and the
// betas for OneCycle).
struct GroupOptions {
  double lr = 1e-3;
  double weight_decay = 0.0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double momentum = 0.0;
  double eps = 1e-8;
  bool non_freeze = false;  // OneBitAdam: stays AdamW on mean gradients

  bool operator==(const GroupOptions&) const = default;
};

}  // namespace ds::optimizers
