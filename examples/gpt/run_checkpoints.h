// Checkpoints of a run of the example: when they are saved, and how a run goes on from one.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>

#include <dsengine/engine.h>

#include "gpt_options.h"

namespace gpt {

// One per rank; all calls are collective. Not thread safe.
class RunCheckpoints {
 public:
  // `text_bytes`: length of the text trained on. `engine` and `options` outlive this.
  RunCheckpoints(ds::engine::Engine& engine, const GptOptions& options, int64_t text_bytes);

  // --load_checkpoint: goes on from the latest checkpoint, where there is one, and says on rank 0 what was found.
  // Throws ds::ConfigError when that run read its data otherwise (seed, order, --seq_len, length of the text):
  // sequences would be seen twice or never.
  void load();
  // --save_checkpoint: after an optimizer step, every --save_interval steps. Returns whether it saved.
  bool after_step();
  // After a save: whether ds-launch wants the run to end here with ds::kRestartExitCode and to be started again; if so,
  // all is on the disk. Without --load_checkpoint never, because that run would begin anew.
  bool restart_wanted();
  // After the last step: saves it, if that is not done already, and returns when all is on the disk.
  void finish();

 private:
  void save();

  ds::engine::Engine& engine_;
  const GptOptions& options_;
  nlohmann::json data_;  // what decides which sequences come when
  int64_t saved_step_ = -1;
};

}  // namespace gpt
