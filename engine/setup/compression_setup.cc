#include "engine/setup/compression_setup.h"

#include <string>

#include "config/compression_rules.h"
#include "core/check.h"
#include "dsengine/model_compression.h"
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

}  // namespace ds::engine
