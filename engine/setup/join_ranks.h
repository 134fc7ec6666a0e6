// Ranks come together, read the config, and form the grid they train on.
#pragma once

#include <memory>
#include <string>

#include "config/plan/plan.h"
#include "dsengine/config.h"
#include "dsengine/device_mesh.h"
#include "dsengine/initialize.h"
#include "dsengine/pipeline.h"
#include "model/state/ranks.h"

namespace ds::engine {

// Null: the model is none.
std::shared_ptr<pipeline::PipelineModule> pipeline_of(const InitializeOptions& options);

// The program's mesh or group, or the ranks of the environment. Reads the config once the number of ranks is known.
// Gives a "cuda" without number the one of this rank on its host. `one_stage`: one rank runs all layers of a pipeline,
// whatever the program's PipelineOptions say of stages. Collective; throws as initialize().
Distributed join_ranks(const InitializeOptions& options, config::DsConfig& config, bool one_stage);

// The program's grid of ranks, or pipelines of pipeline.stages ranks, with data-parallel ranks side by side; without
// the groups of `ranks`, which the plan needs. Collective.
Ranks place_ranks(const Distributed& job, const InitializeOptions& options, const config::DsConfig& config);

// Returns the sizes of the axes that `ranks` are on, for a plan.
Topology topology_of(const Ranks& ranks, int ranks_per_host);

}  // namespace ds::engine
