// The optimizer that a model has, and its states, however it was made: one of ours on slices of buckets, the program's
// wrapped to work on slices, or the program's on full parameters. engine/setup/optimizer_setup.h makes the first kind,
// client_setup.h beside it the other two.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "optim/client_states.h"
#include "optim/shard_optimizer.h"

namespace ds::engine {

// Gives one view of the three kinds. The program's optimizer on slices has both `own`, which wraps it, and `client`; on
// full parameters it has only `client`.
struct ModelOptimizer {
  std::shared_ptr<optimizers::SliceOptimizer> own;  // slice b is that of bucket b
  std::shared_ptr<torch::optim::Optimizer> client;  // the program's, which has the learning rates; null: none
  // The states that the program's optimizer keeps for each group; null: it works on full parameters, at stage 0 in
  // float32.
  std::shared_ptr<const std::vector<optimizers::ClientState>> client_states;

  // Returns the optimizer that the config names, whose groups() the program may change.
  std::shared_ptr<optimizers::ShardOptimizer> of_config() const;
  bool steps_on_parameters() const { return client && !own; }

  std::string name() const;
  std::vector<double> learning_rates() const;  // the rate of each parameter group
  // Returns the options of the groups, as a checkpoint keeps them; set_group_options() takes as many groups.
  std::vector<optimizers::GroupOptions> group_options() const;
  void set_group_options(const std::vector<optimizers::GroupOptions>& options) const;
  // Returns {beta1, beta2} or {momentum, 0} of each parameter group; empty for the program's optimizer.
  std::vector<std::vector<double>> momenta() const;
  // Returns the number of steps begun so far; 0 for the program's optimizer, which counts by itself.
  int64_t step_count() const { return own ? own->step_count() : 0; }
  // Sets the step count back after a step that failed.
  void go_back_to(int64_t steps) const;
  // Returns the flat states of a bucket; none for the program's optimizer.
  optimizers::NamedStates states(size_t bucket) const;
  // Returns the weights that the model has for a bucket with this master.
  at::Tensor weights(size_t bucket, const at::Tensor& master) const;
};

}  // namespace ds::engine
