// Parameters that the program has frozen since initialize (set_requires_grad(false)): an update leaves their masters,
// states and weights as they are, where it would move them by momentum and decay.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "model/state/model_state.h"

namespace ds::engine {

// Around the update of one bucket.
class HeldStill {
 public:
  // Whether the bucket has such parameters in this rank's part.
  static bool wanted(const ModelState& state, size_t bucket);
  // Throws UsageError where there are such parameters and the update does not pass by here, or works on more than flat
  // states of a slice.
  static void require_possible(const ModelState& state);

  // Keeps what they have. `own`: what of the bucket's weights this rank updates.
  HeldStill(const ModelState& state, size_t bucket, const at::Tensor& own);
  void restore() const;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;  // a part of a tensor, what it held
};

}  // namespace ds::engine
