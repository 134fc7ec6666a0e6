// Derives the options of reducer, buckets, offloading, loss scaler and recomputation from config and plan. This is the
// one place where a value of the config replaces the default of such a part.
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

// Converts a dtype of the config.
at::ScalarType scalar_type(config::DType dtype);
// Converts a dtype that may be missing.
std::optional<at::ScalarType> scalar_type(const std::optional<config::DType>& dtype);

// `model`: the name of the model, for messages.
zero::ReducerOptions reducer_options(const Plan& plan, const std::string& model);

// `pipeline` may be null.
BucketOptions bucket_options(const Plan& plan, const PipelineState* pipeline, const ModelParameters& parameters);

// Describes what is kept beside the device. The result refers to `layout`.
OffloadedLayout offloaded_layout(const ModelState& model, const ModelLayout& layout,
                                 const config::OptimizerSection& optimizer);

optimizers::LossScalerOptions loss_scaler_options(const config::DsConfig& config);

// Returns the options of recompute::checkpoint() for this thread; those without a key are as in `own`. Throws
// ConfigError.
recompute::CheckpointOptions checkpoint_options(const config::ActivationCheckpointingSection& section,
                                                recompute::CheckpointOptions own);

std::chrono::milliseconds stall_limit(const config::DsConfig& config);

}  // namespace ds::engine
