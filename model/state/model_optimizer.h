// The optimizer of a model, with its states: an optimizer over the buckets, of ours or made of the program's, or the
// program's own over the parameters.
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

// An optimizer of the program works on slices, and then `own` is made of it, or on whole parameters: no `own` then.
struct ModelOptimizer {
  std::shared_ptr<optimizers::SliceOptimizer> own;  // slice b is that of bucket b
  std::shared_ptr<torch::optim::Optimizer> client;  // the program's, which has the learning rates
  // The states that the program's keeps of the parameters of each group; null: it works on whole parameters, at stage 0
  // in float32.
  std::shared_ptr<const std::vector<optimizers::ClientState>> client_states;

  // The optimizer that the config names, which the program changes by groups().
  std::shared_ptr<optimizers::ShardOptimizer> of_config() const;
  bool steps_on_parameters() const { return client && !own; }

  std::string name() const;
  std::vector<double> learning_rates() const;  // the rate of each parameter group
  // The options of the groups, as a checkpoint keeps them; set_group_options() takes as many groups.
  std::vector<optimizers::GroupOptions> group_options() const;
  void set_group_options(const std::vector<optimizers::GroupOptions>& options) const;
  // {beta1, beta2} or {momentum, 0} of each parameter group; empty for the program's.
  std::vector<std::vector<double>> momenta() const;
  // Steps begun so far; 0 for the program's, which counts by itself.
  int64_t step_count() const { return own ? own->step_count() : 0; }
  // Sets the step count back after a step that failed.
  void go_back_to(int64_t steps) const;
  // Returns the flat states of a bucket; none for the program's.
  optimizers::NamedStates states(size_t bucket) const;
  // Returns the weights that the model has for a bucket with this master.
  at::Tensor weights(size_t bucket, const at::Tensor& master) const;
};

}  // namespace ds::engine
