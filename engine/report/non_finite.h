// Tells where a gradient that is infinite or NaN came from: the facts that each rank knows, and the message made from
// those of all ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/report/batch_notes.h"
#include "model/state/model_state.h"

namespace ds::engine {

// The facts that one rank found.
struct NonFiniteFacts {
  // The first bad element of the reduced gradient, as far as this rank has it.
  struct Element {
    int64_t stage = 0;      // the stage of the pipeline
    int64_t parameter = 0;  // index among those of the rank
    int64_t offset = 0;     // inside the parameter, flattened
    std::string name;       // the name of the parameter
    std::string value;      // "nan", "inf" or "-inf"
  };
  // The first bad loss of the accumulation.
  struct Loss {
    int64_t micro_batch = 0;
    std::string batch;  // "samples 17, 99 of the training data"; empty: not known
    std::string value;
    int64_t others = 0;  // bad losses after it
  };
  // The first bad gradient that this rank's autograd made (locate_non_finite).
  struct Local {
    int64_t micro_batch = 0;  // -1: not known
    std::string batch;
    std::string parameter;
    int64_t ranks_before = 0;  // the ranks of the pipeline whose backward comes before this one's
  };

  std::optional<Element> element;
  std::optional<Loss> loss;
  std::optional<Local> local;
};

// The facts as text, for the way between ranks, and back.
std::string to_text(const NonFiniteFacts& facts);
NonFiniteFacts non_finite_facts(const std::string& text);

// The gradient that describe_non_finite() is asked about.
struct NonFiniteQuestion {
  double norm = 0;             // the norm of the full gradient
  bool own_gradients = false;  // ranks keep those of their own, which are not reduced
  bool located = false;        // locate_non_finite
  bool expected = false;       // a dynamic loss scale, which is found by overflows
  bool late = false;           // the gradients have gone
};

// "nan", "inf" or "-inf", whatever the library makes of them.
std::string name_of_non_finite(double value);

// "the gradient is not finite: first in parameter h.3.mlp.weight, element 77, which is nan; rank 3's loss of ...", from
// the facts of all ranks, in their order.
std::string describe_non_finite(const NonFiniteQuestion& question, const std::vector<NonFiniteFacts>& ranks);

// The step whose norm is not finite.
struct NonFiniteStep {
  int64_t number = 0;
  double norm = 0;
  std::optional<double> loss_scale;
  bool dynamic_scale = false;     // which finds its size by overflows
  bool judged_by_default = true;  // non_finite_gradients: "auto"
  bool late = false;              // its gradients have gone: the host did not wait for the device
};

// Explains a gradient that is not finite from what all ranks know of it. To be called before the gradients are dropped,
// but for a late step. `batches`: those of the step. Returns the same text on all ranks. Collective.
std::string explain_non_finite(const ModelState& state, const BatchNotes& batches, const NonFiniteStep& step);

}  // namespace ds::engine
