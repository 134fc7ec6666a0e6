// From the config and the plan to the options of an engine's parts: the one place where they meet, and where a part's
// own default is replaced.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <optional>

#include "config/plan/plan.h"
#include "dsengine/activation_checkpoint.h"
#include "dsengine/config.h"
#include "model/state/model_layout.h"
#include "model/state/model_state.h"
#include "optim/loss_scaler.h"
#include "zero/reduction/gradient_reducer.h"

namespace ds::engine {

at::ScalarType scalar_type(config::DType dtype);
// Nothing stays nothing.
std::optional<at::ScalarType> scalar_type(const std::optional<config::DType>& dtype);

// `model`: its name, for messages.
zero::ReducerOptions reducer_options(const Plan& plan, const std::string& model);

// `pipeline` may be null.
BucketOptions bucket_options(const Plan& plan, const PipelineState* pipeline, const ModelParameters& parameters);

// What is kept beside the device. Keeps references to `layout`.
OffloadedLayout offloaded_layout(const ModelState& model, const ModelLayout& layout,
                                 const config::OptimizerSection& optimizer);

optimizers::LossScalerOptions loss_scaler_options(const config::DsConfig& config);

// Of recompute::checkpoint() on this thread; what has no key is as in `own`. Throws ConfigError.
recompute::CheckpointOptions checkpoint_options(const config::ActivationCheckpointingSection& section,
                                                recompute::CheckpointOptions own);

std::chrono::milliseconds stall_limit(const config::DsConfig& config);

}  // namespace ds::engine
