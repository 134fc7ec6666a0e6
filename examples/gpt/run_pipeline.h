// Training and sampling where the model is a pipeline.
#pragma once

#include <dsengine/engine.h>

#include "gpt_options.h"
#include "metrics_file.h"
#include "run_checkpoints.h"
#include "text_sampler.h"
#include "token_batches.h"

namespace gpt {

// Trains up to --steps in all; false when it ends before, to be started again. Every rank calls it.
bool train_pipeline(ds::engine::Engine& engine, const GptOptions& options, TokenBatches& batches,
                    RunCheckpoints& checkpoints, MetricsFile* metrics);

// The logits of the whole pipeline, on every rank of it. `engine` outlives it.
Logits pipeline_logits(ds::engine::Engine& engine);

}  // namespace gpt
