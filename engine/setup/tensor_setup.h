// A module's parameters over the ranks of a tensor axis, before buckets are made of them.
#pragma once

#include <memory>
#include <vector>

#include "config/plan/plan.h"
#include "dsengine/config.h"
#include "dsengine/initialize.h"
#include "model/state/model_layout.h"
#include "model/state/ranks.h"
#include "model/state/start_files.h"
#include "model/state/tensor_parts.h"

namespace ds::engine {

// Splits the module in place: by the rules of the program or, without any, of the config. Leaves have rank 0's values,
// tensor by tensor, or, where `files` give them, unspecified ones in memory of their own; files that lack some are
// settled for these. Null with one rank along the axis: nothing is split. Throws ConfigError without rules, CommError
// where ranks disagree on rules or parameters, UsageError as parallelize_module. Collective over all ranks.
std::unique_ptr<TensorParts> split_over_tensor_axis(const Ranks& ranks, const InitializeOptions& options,
                                                    const config::DsConfig& config, StartFiles& files);

// Makes every parameter a summed one of the sequence axis, on whose split tensors an unmodified model computes. Null:
// there is no such axis, or the program cuts its sequences. Throws ConfigError for what excludes it. Collective.
std::unique_ptr<TensorParts> cut_over_sequence_axis(const Ranks& ranks, const InitializeOptions& options,
                                                    const config::DsConfig& config, StartFiles& files);

// What a plan tells of it.
void add_splits(const TensorParts& parts, const ModelParameters& parameters, PlanFacts& facts);

}  // namespace ds::engine
