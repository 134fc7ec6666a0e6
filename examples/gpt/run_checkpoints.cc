#include "run_checkpoints.h"

#include <iostream>

#include <dsengine/launch.h>

#include "check.h"

namespace gpt {

RunCheckpoints::RunCheckpoints(ds::engine::Engine& engine, const GptOptions& options, int64_t text_bytes)
    : engine_(engine),
      options_(options),
      data_({{"seed", options.seed},
             {"order", options.order == Order::kRandom ? "random" : "sequential"},
             {"seq_len", options.seq_len},
             {"text_bytes", text_bytes}}) {}

void RunCheckpoints::load() {
  if (!options_.load_checkpoint) return;
  const ds::engine::LoadedCheckpoint loaded = engine_.load_checkpoint(*options_.load_checkpoint);
  if (loaded.path.empty()) {
    if (engine_.global_rank() == 0) {
      std::cout << "no checkpoint in " << *options_.load_checkpoint << ": a new run" << std::endl;
    }
    return;
  }
  const nlohmann::json saved = loaded.client_state.value("data", nlohmann::json());
  require<ds::ConfigError>(saved.is_null() || saved == data_, loaded.path, ": that run read its data with ", saved,
                           ", this one with ", data_, "; go on with the same --seed, --order, --seq_len and --data");
  saved_step_ = engine_.global_steps();
  if (engine_.global_rank() == 0) {
    std::cout << "goes on from " << loaded.path << ", after step " << engine_.global_steps() << std::endl;
  }
}

bool RunCheckpoints::after_step() {
  const bool due =
      options_.save_checkpoint && options_.save_interval > 0 && engine_.global_steps() % options_.save_interval == 0;
  if (due) save();
  return due;
}

bool RunCheckpoints::restart_wanted() {
  if (!options_.load_checkpoint || !ds::engine::restart_wanted(engine_)) return false;
  engine_.wait_for_checkpoint();
  return true;
}

void RunCheckpoints::finish() {
  if (options_.save_checkpoint && saved_step_ != engine_.global_steps()) save();
  engine_.wait_for_checkpoint();
}

void RunCheckpoints::save() {
  engine_.save_checkpoint(*options_.save_checkpoint, "",
                          {.client_state = {{"data", data_}}, .keep_last = options_.keep_checkpoints});
  saved_step_ = engine_.global_steps();
}

}  // namespace gpt
