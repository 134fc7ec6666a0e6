// From an optimizer of the program (InitializeOptions::optimizer) to one that works on this rank's slices.
#pragma once

#include <memory>

#include "dsengine/initialize.h"
#include "engine/setup/optimizer_setup.h"
#include "model/state/model_layout.h"
#include "model/state/model_state.h"

namespace ds::engine {

// How the optimizer will work, which it is asked before there is a plan: on slices, or, where it cannot and the config
// leaves parameters whole, on these. A class that is none of torch's is tried on small tensors
// (optim/elementwise_probe.h), but only where slices are needed. Throws ConfigError, with its name and the reason.
ModelOptimizer describe_client(const InitializeOptions& options, const config::DsConfig& config, int tensor_ranks);

// What it excludes. Throws ConfigError.
void require_compatible_client(const ModelOptimizer& optimizer, const InitializeOptions& options, const Plan& plan);

// Its groups; one more, the last, where it has not all trainable parameters: these stay as they are. Throws UsageError
// for tensors that are no parameters of the model, and for states that are not those of one number of steps.
OptimizerGroups client_groups(const ModelOptimizer& optimizer, const ModelParameters& parameters,
                              const torch::nn::Module& module);

// One slice for each bucket, with the states that it has so far. `model`, which has its masters and buckets, outlives
// it.
std::shared_ptr<optimizers::SliceOptimizer> build_client_optimizer(const ModelState& model);

}  // namespace ds::engine
