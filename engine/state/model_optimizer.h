// Who has the optimizer's states: an optimizer of ours over the buckets, or the program's own over the parameters.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "optim/shard_optimizer.h"

namespace ds::engine {

// One of the two is set.
struct ModelOptimizer {
  std::shared_ptr<optimizers::ShardOptimizer> own;  // slice b is that of bucket b
  std::shared_ptr<torch::optim::Optimizer> client;  // stage 0 and float32 only

  std::string name() const;
  std::vector<double> learning_rates() const;  // of each parameter group
  // {beta1, beta2} or {momentum, 0} of each parameter group; empty for the program's.
  std::vector<std::vector<double>> momenta() const;
  // Steps begun so far; 0 for the program's, which counts by itself.
  int64_t step_count() const { return own ? own->step_count() : 0; }
  // After a step that failed: as if there had been so many.
  void go_back_to(int64_t steps) const;
  // Flat states of a bucket; none for the program's.
  optimizers::NamedStates states(size_t bucket) const;
  // What the model has of a bucket whose master this is.
  at::Tensor weights(size_t bucket, const at::Tensor& master) const;
};

}  // namespace ds::engine
