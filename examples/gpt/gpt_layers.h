// The GPT of gpt_model.h as a list of layers, for pipelines: the same parameters under the same names.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <dsengine/pipeline.h>

#include "drops.h"
#include "gpt_model.h"

namespace gpt {

// Nothing: what the ds_config says.
struct PipelineShape {
  std::optional<int> stages;
  std::optional<std::string> schedule;
};

// wte, wpe, blocks, ln_f, head, with start values as initialize_weights() gives them. `drops`: read in forward, so that
// it may be filled later.
std::shared_ptr<ds::pipeline::PipelineModule> make_layers(const GptConfig& config, uint64_t seed,
                                                          const PipelineShape& shape,
                                                          const std::shared_ptr<const Drops>& drops);

}  // namespace gpt
