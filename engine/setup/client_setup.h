// Makes the optimizer of an engine from one of the program (InitializeOptions::optimizer), which then works on this
// rank's slices, or on full parameters at stage 0. An optimizer that the config names is made in optimizer_setup.h.
#pragma once

#include <memory>

#include "dsengine/initialize.h"
#include "engine/setup/optimizer_setup.h"
#include "model/state/model_layout.h"
#include "model/state/model_state.h"

namespace ds::engine {

// Decides, before there is a plan, whether the optimizer works on slices or, where it cannot and the config leaves
// parameters full, on full parameters. A class that is none of torch's is tried on small tensors
// (optim/elementwise_probe.h), but only where slices are needed. Throws ConfigError, with its name and the reason.
ModelOptimizer describe_client(const InitializeOptions& options, const config::DsConfig& config, int tensor_ranks);

// Throws ConfigError for features that an optimizer of the program excludes.
void require_compatible_client(const ModelOptimizer& optimizer, const InitializeOptions& options, const Plan& plan);

// Returns the groups of the program's optimizer. Trainable parameters that it does not have are in a further group, the
// last, and stay as they are. Throws UsageError
// for tensors that are no parameters of the model, and for states that are not those of one number of steps.
OptimizerGroups client_groups(const ModelOptimizer& optimizer, const ModelParameters& parameters,
                              const torch::nn::Module& module);

// Wraps the program's optimizer, with a slice for each bucket and the states that it has so far. `model`, which has its
// masters and buckets, outlives the result.
std::shared_ptr<optimizers::SliceOptimizer> build_client_optimizer(const ModelState& model);

}  // namespace ds::engine
