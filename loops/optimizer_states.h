// The states that an optimizer of the program keeps for this rank's slices, apart from where they are written or read.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "dsengine/fully_shard.h"
#include "dsengine/optimizer.h"
#include "loops/sharded_model.h"
#include "optim/client_states.h"

namespace ds::loops {

// The states of one leaf that the optimizer has.
struct LeafStates {
  const SliceLeaf* leaf = nullptr;
  const optimizers::ClientState* kind = nullptr;
  int64_t steps = 0;                // steps that its state has seen; 0: it has none
  optimizers::NamedStates tensors;  // flat [elements of the leaf], by the names of `kind`
};

// Reads and replaces the states of one optimizer, between passes. Lives for one call.
class OptimizerStates {
 public:
  // Throws UsageError, as `call`, for an optimizer that is not elementwise, whose states have no names, or that has
  // other tensors than slices of the model.
  OptimizerStates(const ShardedModel& model, torch::optim::Optimizer& optimizer, const char* call);

  // The states of the leaves that are in a group of the optimizer, in module order.
  std::vector<LeafStates> read() const;
  // Replaces the states that the optimizer has of that leaf; without steps it begins anew.
  void give(const LeafStates& states) const;
  // The leaves in the optimizer, without states.
  std::vector<LeafStates> leaves() const;
  // Whether a state of that kind says how many steps it has seen.
  static bool counts_steps(const optimizers::ClientState& kind);

  const ShardedModel& model() const { return model_; }
  torch::optim::Optimizer& optimizer() const { return optimizer_; }
  const char* call() const { return call_; }

 private:
  void begin_anew(const LeafStates& states) const;

  const ShardedModel& model_;
  torch::optim::Optimizer& optimizer_;
  const char* call_;
  std::vector<optimizers::ClientState> kinds_;  // by group
  std::unordered_map<const void*, size_t> group_of_;
};

// Implement the functions of these names of FullySharded, which documents them.
StateDict full_optimizer_state(const OptimizerStates& states, const FullStateOptions& options);
void load_full_optimizer_state(const OptimizerStates& states, const StateDict& state, bool broadcast);
std::vector<ShardedTensor> sharded_optimizer_state(const OptimizerStates& states);
void load_sharded_optimizer_state(const OptimizerStates& states, const std::vector<ShardedTensor>& parts);

}  // namespace ds::loops
