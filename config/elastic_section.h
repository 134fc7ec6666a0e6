// `elasticity` turned into the batch sizes of a config.
#pragma once

#include "core/json/json_problems.h"
#include "dsengine/config.h"

namespace ds::engine::config {

// Sets config.elastic and the three batch sizes for config.dp_world_size, in place of those of the file; warns of what
// it replaces, and of a world size that changes the global batch. Mistakes of the section, and a world size that it
// does not allow, are errors.
//
// `scheduled`: the section as the scheduler of the job has seen it, JSON (the environment variable
// DEEPSPEED_ELASTICITY_CONFIG); null: unknown. max_train_batch_size, micro_batch_sizes and version have to agree.
void resolve_elastic_batch(DsConfig& config, const char* scheduled, JsonProblems& problems);

}  // namespace ds::engine::config
