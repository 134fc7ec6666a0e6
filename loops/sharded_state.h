// The state of a sharded module, as values by name, and from values by name.
#pragma once

#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

#include "dsengine/fully_shard.h"
#include "dsengine/memory.h"
#include "loops/sharded_model.h"

namespace ds::loops {

// Implement the functions of these names of FullySharded, which documents them. Called between passes.
StateDict full_state(const ShardedModel& model, const FullStateOptions& options);
void load_full_state(ShardedModel& model, const StateDict& state, bool broadcast);
std::vector<ShardedTensor> sharded_state(const ShardedModel& model);
void load_sharded_state(ShardedModel& model, const std::vector<ShardedTensor>& parts);
StateDict local_state(const ShardedModel& model);
void load_local_state(ShardedModel& model, const StateDict& state);
// Write and read a checkpoint. `optimizer`: null: without its states.
std::string save_state(ShardedModel& model, const std::string& folder, const std::string& tag,
                       torch::optim::Optimizer* optimizer);
void load_state(ShardedModel& model, const std::string& folder, const std::string& tag,
                torch::optim::Optimizer* optimizer);

// Implements FullySharded::held_bytes().
zero::HeldBytes held_bytes(const ShardedModel& model);
// Implements FullySharded::clip_grad_norm_().
double clip_gradients(const ShardedModel& model, double max_norm, double norm_type);

}  // namespace ds::loops
