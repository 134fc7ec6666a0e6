// The state that a torch::optim::Optimizer of the program keeps of a parameter, and its groups, in the terms of
// optimizers here.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/lr_schedule.h"

namespace ds::optimizers {

// Tensors of a state by the names that torch has for them, undefined ones too, and its count of steps. They point into
// the state.
struct StateFields {
  std::vector<std::pair<std::string, at::Tensor*>> tensors;
  int64_t* step = nullptr;  // null: it counts none
};
// Nothing for a class that is none of torch's, or is derived from one.
std::optional<StateFields> fields_of(torch::optim::OptimizerParamState& state);

// The state that each parameter of a group has between steps.
struct ClientState {
  std::vector<std::string> names;                                      // tensors with an element for each weight
  std::shared_ptr<const torch::optim::OptimizerParamState> prototype;  // null: it keeps nothing
  bool from_start = false;                                             // its tensors are zeros before the first step
  bool is_known = true;                                                // false: of a class whose tensors have no names
  bool is_written = false;            // of a class of the program's, known by what it writes (optim/written_states.h)
  std::vector<std::string> counters;  // of such a one: numbers that count steps
};

// "AdamW" for one of torch's, else the name of its class.
std::string client_name(const torch::optim::Optimizer& optimizer);
// Describes the state of each group of an optimizer of torch's that updates each element by itself; nothing for other
// classes.
std::optional<std::vector<ClientState>> states_of_torch(const torch::optim::Optimizer& optimizer);

// The options of a group that have a name here; those of a class that is none of torch's: lr. Throws c10::Error where
// such a class does not say it.
GroupOptions group_options_of(const torch::optim::OptimizerOptions& options);
// Calls `visit` with the name and the value of each option of a group that a step reads; a flag is 0 or 1. Of a class
// that is none of torch's it is lr alone.
void visit_options(const torch::optim::OptimizerOptions& options,
                   const std::function<void(const char* name, double value)>& visit);
// Returns the sum of the steps that states of torch's classes have counted for the parameters of a group; 0 where the
// optimizer has none of them.
int64_t counted_steps(const torch::optim::Optimizer& optimizer, const torch::optim::OptimizerParamGroup& group);
// Into the options, as far as they have them.
void set_group_options(torch::optim::OptimizerOptions& options, const GroupOptions& values);

}  // namespace ds::optimizers
