// What a program finds in parameters' .grad between the backward() that gives the last gradients of a step and step().
//
// At stage 0 it is the reduced gradient itself, which the step applies, so that a change in place counts
// (torch::nn::utils::clip_grad_norm_). Where a rank has less or something else (its slice, gradients in host memory,
// with loss scale, not reduced yet) it is a tensor that throws when its memory is read, with the call that gives the
// whole one. Gradients that a program takes away or replaces are an error of step(), before anything is applied.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "engine/state/model_state.h"

namespace ds::engine {

// On the engine's thread; the state outlives it.
class ShownGradients {
 public:
  explicit ShownGradients(const ModelState& state) : state_(state) {}

  // After the pass. `reduced`: it was the last one of the step, and reduces. `loss_scale`: what is in the gradients.
  // Waits for the reductions where they are shown.
  void show(bool reduced, double loss_scale);
  // Throws UsageError where .grad of a parameter is not what was shown.
  void require_untouched() const;
  // What was shown goes, before gradients are made or used.
  void take_back();

 private:
  const char* reason_against(bool reduced, double loss_scale) const;
  const at::Tensor& stand_in(size_t parameter, const char* reason);
  void show(size_t parameter, const at::Tensor& gradient);

  const ModelState& state_;
  bool showing_ = false;
  std::vector<at::Tensor> shown_;      // by parameter; undefined: nothing
  const char* reason_ = nullptr;       // of stand_ins_
  std::vector<at::Tensor> stand_ins_;  // by parameter, kept from step to step
};

}  // namespace ds::engine
