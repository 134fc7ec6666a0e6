// Where a gradient that is infinite or NaN came from: what each rank knows, and the words for what all know.
// Torch-free.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ds::engine {

// What one rank found.
struct NonFiniteFacts {
  // The first bad element of the reduced gradient, as far as this rank has it.
  struct Element {
    int64_t stage = 0;      // of the pipeline
    int64_t parameter = 0;  // index among those of the rank
    int64_t offset = 0;     // inside the parameter, flattened
    std::string name;       // of the parameter
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
    int64_t ranks_before = 0;  // of the pipeline: whose backward comes before this one's
  };

  std::optional<Element> element;
  std::optional<Loss> loss;
  std::optional<Local> local;
};

// For the way between ranks.
std::string to_text(const NonFiniteFacts& facts);
NonFiniteFacts non_finite_facts(const std::string& text);

struct NonFiniteQuestion {
  double norm = 0;             // of the whole gradient
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

}  // namespace ds::engine
