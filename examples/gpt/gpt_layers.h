// The GPT of gpt_model.h as a list of layers, for pipelines: the same parameters under the same names.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <dsengine/pipeline.h>

#include "gpt_model.h"

namespace gpt {

// wte, wpe, blocks, ln_f, head, with start values as initialize_weights() gives them. The pipeline has `stages` ranks,
// or as many as the ds_config says, and `schedule` or the one of the
// ds_config.
std::shared_ptr<ds::pipeline::PipelineModule> make_layers(const GptConfig& config, uint64_t seed,
                                                          std::optional<int> stages,
                                                          std::optional<std::string> schedule);

}  // namespace gpt
