// Whether an optimizer of the program updates each element by itself, so that it can work on slices: found by trying.
#pragma once

#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

#include "optim/client_states.h"

namespace ds::optimizers {

struct ElementwiseProbe {
  std::string problem;              // why it cannot work on slices, as the end of a sentence; empty: it can
  std::vector<ClientState> states;  // of its groups; empty with a problem
};

// Runs the optimizer, with the options of each of its groups and a learning rate of at least 0.05, on a few small
// tensors in the place of its parameters: permuted, in another shape, and cut in two that step one after the other,
// each has to come to the same values; last on a matrix of 160 x 144, in a row and cut, with gradients of two sizes.
// What begins with more elements or more steps than these is not found. Groups and states are those of before when it
// returns; what the optimizer has beside them has taken the steps, and is found by that: such an optimizer has a
// problem.
ElementwiseProbe probe_elementwise(torch::optim::Optimizer& optimizer);

}  // namespace ds::optimizers
