#include "engine/setup/layer_setup.h"

#include <string>

#include "comm/subgroups.h"
#include "config/compression_rules.h"
#include "core/check.h"
#include "core/log.h"
#include "dsengine/model_compression.h"
#include "layers/batch_norm/converted_layers.h"
#include "layers/compressed/compressed_model.h"

namespace ds::engine {

void set_up_compression(const InitializeOptions& options, const config::DsConfig& config, bool is_pipeline,
                        int tensor_ranks) {
  const config::CompressionTrainingSection& section = config.compression_training;
  const bool has_rules = !config::compression_rules(section).empty();
  require<ConfigError>(!config.fp8.enabled || !model_compression::find_model(*options.model), "fp8: expected a model ",
                       "whose layers have their own weights, found one that init_compression() has prepared; fp8 with ",
                       "compression_training is not available: turn one of them off");
  const std::string prepared = model_compression::layer_of_another(*options.model);
  require(prepared.empty(),
          "initialize: expected a .model that init_compression() has prepared itself, or not at all, ", "found ",
          prepared, ", which is prepared as a layer of another module, whose schedules no step of this engine ",
          "would reach; call init_compression() with the module that is .model");
  if (!has_rules && !section.layer_reduction.enabled) return;
  require<ConfigError>(!is_pipeline,
                       "compression_training: expected a model that each rank has all layers of, found a ",
                       "pipeline::PipelineModule; turn its methods off, or train without pipeline stages");
  require<ConfigError>(tensor_ranks <= 1, "compression_training: expected whole parameters, found ", tensor_ranks,
                       " ranks of a tensor axis; turn its methods off, or set tensor_parallel.autotp_size to 1");
  if (model_compression::find_model(*options.model)) return;
  require<ConfigError>(!section.layer_reduction.enabled,
                       "compression_training.layer_reduction: expected a student that ",
                       "has its teacher's values; call engine::init_compression(*model, config, teacher) before ",
                       "initialize() (dsengine/model_compression.h)");
  init_compression(*options.model, config.text);
}

size_t layers_that_wait_for_ranks(torch::nn::Module& module) { return norm::layers_without_ranks(module).size(); }

void set_up_batch_norms(ModelState& model, const config::DsConfig& config) {
  comm::Communicator& ranks = *model.ranks.part;
  if (config.broadcast_buffers && ranks.size() > 1) {
    model.ranks.groups.buffers = comm::own_group(ranks, comm::consecutive_ranks(ranks.size(), ranks.size()), "buffers");
  }
  const auto layers =
      config.sync_batchnorm ? norm::batch_norms_of(*model.module) : norm::layers_without_ranks(*model.module);
  model.ranks.groups.norms = norm::give_ranks(layers, ranks);
  if (config.sync_batchnorm && layers.empty() && !model.plan.pipeline && ranks.rank() == 0) {
    log::warning("sync_batchnorm: expected BatchNorm1d, 2d or 3d layers in the model, found none");
  }
}

}  // namespace ds::engine
