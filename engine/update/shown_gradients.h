// What a program finds in parameters' .grad between the backward() that gives the last gradients of a step and step().
//
// At stage 0 it is the reduced gradient itself, which the step applies, so that a change in place counts
// (torch::nn::utils::clip_grad_norm_). Where a rank has less or something else (its slice, its part of a split
// parameter, gradients in host memory, with loss scale, not reduced yet, or inside an accumulation) it is a tensor that
// throws when its memory is read, with the call that gives the whole one. Gradients that a program takes away or
// replaces are an error of the next call, before anything is applied.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <vector>

#include "model/state/model_state.h"

namespace ds::engine {

// On the engine's thread; the state outlives it.
class ShownGradients {
 public:
  explicit ShownGradients(const ModelState& state) : state_(state) {}

  enum class After : uint8_t {
    kPart,         // the accumulation goes on
    kUnreduced,    // it was the last pass of the step, and does not reduce (no_sync)
    kLastGradient  // it was, and reduces
  };
  // After a pass. `scaled`: there is a loss scale in the gradients. Waits for the reductions where they are shown.
  void show(After pass, bool scaled);
  // Throws UsageError where .grad of a parameter is not what was shown. `call`: whose.
  void require_untouched(const char* call) const;
  // What was shown goes, before gradients are made or used. Returns how often the program has changed it in place.
  uint64_t take_back();

 private:
  const char* reason_against(After pass, bool scaled) const;
  void show_split(const char* reason);
  const at::Tensor& stand_in(size_t parameter, const char* reason);

  const ModelState& state_;
  bool showing_ = false;
  bool readable_ = false;            // what is shown: gradients, not their stand-ins
  std::vector<at::Tensor> shown_;    // by parameter; undefined: nothing
  std::vector<const void*> memory_;  // the storages of those
  // By reason, a literal, and parameter; kept from step to step.
  std::map<const char*, std::vector<at::Tensor>> stand_ins_;
  std::vector<at::Tensor> split_stand_ins_;  // of the module's split parameters, with the first reason there was
};

}  // namespace ds::engine
