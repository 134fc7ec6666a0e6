#include "run_pipeline.h"

#include <dsengine/config.h>
#include <dsengine/launch.h>

#include <cstdint>

#include "check.h"
#include "training_log.h"

namespace gpt {
namespace {

// The ds_config is read before the ranks have met.
int64_t read_stages(const GptOptions& options) {
  try {
    const ds::engine::config::DsConfig config = ds::engine::config::parse(
        options.deepspeed_config, {.world_size = ds::launched_ranks(), .auto_values = options.auto_values});
    return config.pipeline.stages.value_or(1);
  } catch (const ds::ConfigError&) {
    return 1;  // initialize() says what is wrong
  }
}

}  // namespace

std::optional<int> stages_of_config(const GptOptions& options) {
  const int64_t stages = read_stages(options);
  if (stages == 1) return std::nullopt;
  require<ds::ConfigError>(!options.save && !options.export_hf && !options.load_hf,
                           "--save, --export_hf and --load_hf ",
                           "want all weights on one rank, but pipeline.stages of ", options.deepspeed_config, " is ",
                           stages, "; save a checkpoint (--save_checkpoint), or set the stages to 1");
  return static_cast<int>(stages);
}

bool train_pipeline(ds::engine::Engine& engine, const GptOptions& options, TokenBatches& batches,
                    RunCheckpoints& checkpoints, MetricsFile* metrics) {
  TrainingLog log(engine, options, metrics);
  const int64_t micro_batch = engine.train_micro_batch_size_per_gpu() * engine.dp_world_size();
  engine.trace_pipeline(options.pipeline_trace.has_value());
  bool restarts = false;
  int64_t seq_len = options.seq_len;
  while (engine.global_steps() < options.steps && !restarts) {
    int64_t next = engine.global_samples();  // of the ranks of the first and of the last stage, which read the text
    const int64_t length = batches.seq_len();
    if (length != seq_len) engine.reset_activation_shape();  // the curriculum goes on
    seq_len = length;
    const at::Tensor loss = engine.train_batch([&] {
      const TokenBatch batch = batches.get(next);
      engine.name_batch(batches.name(next));
      next += micro_batch;
      return ds::pipeline::MicroBatch{.inputs = {batch.data}, .labels = {batch.target}};
    });
    log.after_micro_batch(loss, seq_len);
    if (!checkpoints.after_step()) continue;
    restarts = checkpoints.restart_wanted();
    log.begin_step();
  }
  log.finish();
  if (options.pipeline_trace) engine.write_pipeline_trace(*options.pipeline_trace);
  return !restarts;
}

Logits pipeline_logits(ds::engine::Engine& engine) {
  return [&engine](const at::Tensor& tokens) {
    const ds::engine::Evaluation evaluation = engine.eval_batch(
        [&] { return ds::pipeline::MicroBatch{.inputs = {tokens}, .labels = {}}; },
        {.num_micro_batches = 1, .compute_loss = false, .return_logits = true, .broadcast_logits = true});
    return evaluation.logits.at(0).at(0);
  };
}

}  // namespace gpt
