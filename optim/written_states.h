// States of classes of the program's, by what their serialize() writes: as torch::save() and torch::load() of the
// optimizer do it.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "dsengine/optimizer.h"

namespace ds::optimizers {

struct WrittenState {
  NamedStates tensors;                     // copies
  std::map<std::string, int64_t> numbers;  // whole ones
};

// Nothing where the class has no serialize(), or writes something else than tensors and whole numbers.
std::optional<WrittenState> written_state(const torch::optim::OptimizerParamState& state);
// Values in the place of what the state has; it keeps tensors of its own.
void read_state(torch::optim::OptimizerParamState& state, const WrittenState& values);

}  // namespace ds::optimizers
