// Dtypes of the parameters that a model comes with: which can be trained, and what the plan has to know of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "config/plan/plan.h"
#include "model/state/model_layout.h"
#include "model/state/ranks.h"

namespace ds::engine {

// Fills in what of a model's parameters decides the plan. Throws UsageError, naming the parameters, for a model that is
// float64 in part.
void add_dtypes(const ModelParameters& parameters, PlanFacts& facts);

// Checks a pipeline, whose ranks know the layers of their own stages only. Collective; throws UsageError on all ranks
// when some are float64 and others are not.
void require_one_precision(const PlanFacts& facts, const Ranks& ranks);

}  // namespace ds::engine
