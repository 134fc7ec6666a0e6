// The model of an engine: what its dtypes allow; from a module on its ranks to buckets, and what reduces and gathers
// them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "config/plan/plan.h"
#include "dsengine/config.h"
#include "model/state/model_layout.h"
#include "model/state/model_state.h"
#include "model/state/ranks.h"
#include "model/state/start_values.h"

namespace ds::engine {

// Fills in what of a model's parameters decides the plan. Throws UsageError, naming the parameters, for a model that is
// float64 in part.
void add_dtypes(const ModelParameters& parameters, PlanFacts& facts);

// Checks a pipeline, whose ranks know the layers of their own stages only. Collective; throws UsageError on all ranks
// when some are float64 and others are not.
void require_one_precision(const PlanFacts& facts, const Ranks& ranks);

// Buckets with the start values, gradient reduction and publication of parameters, in the order in which they refer to
// one another. `group_of` each trainable parameter; `row_widths`: of choose_row_wise_tables(). Plan, ranks and pipeline
// are in `model`. Collective.
void lay_out_model(ModelState& model, const config::DsConfig& config, const ModelParameters& parameters,
                   const std::vector<int>& group_of, const std::vector<int64_t>& row_widths, StartValues& values);

// Prediction for the buckets as they are, in place of the plan's estimate from a number of elements.
void predict_exactly(ModelState& model, const config::DsConfig& config);

}  // namespace ds::engine
