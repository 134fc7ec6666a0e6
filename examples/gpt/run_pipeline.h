// Training and sampling where the model is a pipeline.
#pragma once

#include <dsengine/engine.h>

#include <optional>

#include "gpt_options.h"
#include "metrics_file.h"
#include "run_checkpoints.h"
#include "text_sampler.h"
#include "token_batches.h"

namespace gpt {

// The stages that the ds_config asks for; nothing: one, or the file is wrong, which ds::engine::initialize says. Throws
// ds::ConfigError for flags that want all weights on one rank, if there are several stages.
std::optional<int> stages_of_config(const GptOptions& options);

// Trains up to --steps in all; false when it ends before, to be started again. Every rank calls it.
bool train_pipeline(ds::engine::Engine& engine, const GptOptions& options, TokenBatches& batches,
                    RunCheckpoints& checkpoints, MetricsFile* metrics);

// The logits of the whole pipeline, on every rank of it. `engine` outlives it.
Logits pipeline_logits(ds::engine::Engine& engine);

}  // namespace gpt
