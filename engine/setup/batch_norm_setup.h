// BatchNorm layers over the data ranks, and buffers that follow rank 0.
#pragma once

#include "dsengine/config.h"
#include "model/state/model_state.h"

namespace ds::engine {

// How many layers were converted by the program and wait for ranks; the same on all ranks.
size_t layers_that_wait_for_ranks(torch::nn::Module& module);

// Gives these layers the data ranks and, with the key sync_batchnorm, all others too; makes the group of
// broadcast_buffers. Collective over the data ranks. Throws UsageError for a layer that cannot be converted.
void set_up_batch_norms(ModelState& model, const config::DsConfig& config);

}  // namespace ds::engine
