// Makes the optimizer of an engine from one of the program (InitializeOptions::optimizer), which then works on this
// rank's slices, or on full parameters at stage 0. An optimizer that the config names is made in optimizer_setup.h.
#pragma once

#include <memory>

#include "dsengine/initialize.h"
#include "engine/setup/optimizer_setup.h"
#include "model/state/model_layout.h"
#include "model/state/model_state.h"

namespace ds::engine {

// Throws ConfigError for more than one optimizer of the program, and for one without parameters.
void require_client(const InitializeOptions& options);

// Decides, before there is a plan, whether the optimizer works on slices or, where it cannot and the config leaves
// parameters full, on full parameters. A class that is none of torch's is tried on small tensors
// (optim/elementwise_probe.h), but only where slices are needed. Throws ConfigError, with its name and the reason.
ModelOptimizer describe_client(const InitializeOptions& options, const config::DsConfig& config, const Ranks& ranks);

// Throws ConfigError for features that an optimizer of the program excludes.
void require_compatible_client(const ModelOptimizer& optimizer, const InitializeOptions& options, const Plan& plan);

// Calls .make_optimizer on a model whose layers are built and whose parameters are not split yet, and puts the result
// into `options` and `model`, which has its plan. Collective over all ranks: where one of them fails, all throw.
void make_client(ModelState& model, InitializeOptions& options, const config::DsConfig& config);

// Describes what stages of a pipeline have to bring alike of the program's optimizer, as lines "what<TAB>value"; empty
// without one.
std::string client_lines(const ModelOptimizer& optimizer);

// Returns the groups of the program's optimizer. Trainable parameters that it does not have are in a further group, the
// last, and stay as they are. It may have parameters of modules that another stage of a pipeline uses. Throws
// UsageError for tensors that are no parameters of the model, and for states that are not those of one number of steps.
OptimizerGroups client_groups(const ModelOptimizer& optimizer, const ModelParameters& parameters,
                              const torch::nn::Module& module);

// Wraps the program's optimizer, with a slice for each bucket and the states that it has so far. `model`, which has its
// masters and buckets, outlives the result.
std::shared_ptr<optimizers::SliceOptimizer> build_client_optimizer(const ModelState& model);

}  // namespace ds::engine
