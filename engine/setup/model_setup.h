// The model of an engine: from a module on its ranks to buckets, and what reduces and gathers them.
#pragma once

#include <cstdint>
#include <vector>

#include "dsengine/config.h"
#include "model/state/model_layout.h"
#include "model/state/model_state.h"
#include "model/state/start_values.h"

namespace ds::engine {

// Buckets with the start values, gradient reduction and publication of parameters, in the order in which they refer to
// one another. `group_of` each trainable parameter. Plan, ranks and pipeline are in `model`. Collective.
void lay_out_model(ModelState& model, const config::DsConfig& config, const ModelParameters& parameters,
                   const std::vector<int>& group_of, StartValues& values);

// Prediction for the buckets as they are, in place of the plan's estimate from a number of elements.
void predict_exactly(ModelState& model, const config::DsConfig& config);

}  // namespace ds::engine
