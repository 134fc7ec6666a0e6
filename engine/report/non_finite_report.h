// A gradient that is infinite or NaN, explained from what all ranks know of it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "engine/report/batch_notes.h"
#include "model/state/model_state.h"

namespace ds::engine {

// The step whose norm is not finite.
struct NonFiniteStep {
  int64_t number = 0;
  double norm = 0;
  std::optional<double> loss_scale;
  bool dynamic_scale = false;     // which finds its size by overflows
  bool judged_by_default = true;  // non_finite_gradients: "auto"
  bool late = false;              // its gradients have gone: the host did not wait for the device
};

// Before the gradients are dropped, but for a late step. `batches`: of the step. The same text on all ranks.
// Collective.
std::string explain_non_finite(const ModelState& state, const BatchNotes& batches, const NonFiniteStep& step);
}  // namespace ds::engine
