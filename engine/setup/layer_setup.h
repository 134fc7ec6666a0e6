// Layers that an engine prepares before the parameters of its model are laid out: BatchNorm over the data ranks with
// the buffers that follow rank 0, and compressed layers.
#pragma once

#include "dsengine/config.h"
#include "dsengine/initialize.h"
#include "model/state/model_state.h"

namespace ds::engine {

// Prepares the module where the config asks for it and the program has not. Throws ConfigError for models that cannot
// be: pipelines, split tensors, and layer_reduction without a teacher.
void set_up_compression(const InitializeOptions& options, const config::DsConfig& config, bool is_pipeline,
                        int tensor_ranks);

// How many layers were converted by the program and wait for ranks; the same on all ranks.
size_t layers_that_wait_for_ranks(torch::nn::Module& module);

// Gives these layers the data ranks and, with the key sync_batchnorm, all others too; makes the group of
// broadcast_buffers. Collective over the data ranks. Throws UsageError for a layer that cannot be converted.
void set_up_batch_norms(ModelState& model, const config::DsConfig& config);

}  // namespace ds::engine
