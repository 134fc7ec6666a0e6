// The .grad of parameters as the program finds it between step() and the backward() before it.
//
// At stage 0 it is the reduced gradient itself, which the step applies, so that a change in place counts
// (torch::nn::utils::clip_grad_norm_). Elsewhere a rank has no such tensor: it has a slice, or a part of a split
// parameter, or the gradient is in host memory, has a loss scale in it, is not reduced yet, or is still added to. Then
// .grad is a stand-in that throws when its memory is read; the message names the call that gives the full gradient. A
// program that takes .grad away or replaces it gets an error in its next call, before anything is applied.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <vector>

#include "model/state/model_state.h"

namespace ds::engine {

// Used by the engine's thread. The state outlives it.
class ShownGradients {
 public:
  explicit ShownGradients(const ModelState& state) : state_(state) {}

  // The kind of backward pass after which gradients are shown.
  enum class After : uint8_t {
    kPart,         // a pass after which the accumulation goes on
    kUnreduced,    // the last pass of a step, which does not reduce (no_sync)
    kLastGradient  // the last pass of a step, which reduces
  };
  // Sets .grad after a pass. `factor`: what the gradients are still multiplied by, for the message, a literal; null:
  // nothing. Waits for the reductions where reduced gradients are shown.
  void show(After pass, const char* factor);
  // Throws UsageError where .grad of a parameter is not what was shown. `call`: the function for the message.
  void require_untouched(const char* call) const;
  // Takes away what was shown, before gradients are made or used. Returns how often the program has changed it in
  // place.
  uint64_t take_back();

 private:
  const char* reason_against(After pass, const char* factor) const;
  void show_split(const char* reason);
  const at::Tensor& stand_in(size_t parameter, const char* reason);

  const ModelState& state_;
  bool showing_ = false;
  std::vector<at::Tensor> shown_;    // by parameter; undefined: nothing
  std::vector<const void*> memory_;  // their storages
  std::vector<bool> changeable_;     // which are gradients, not stand-ins
  // The stand-ins by reason (a literal) and parameter, kept from step to step.
  std::map<const char*, std::vector<at::Tensor>> stand_ins_;
  std::vector<at::Tensor> split_stand_ins_;  // of the module's split parameters, with the first reason there was
};

}  // namespace ds::engine
