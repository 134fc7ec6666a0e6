// A sharded module in a checkpoint, by the engine's code: one format, any number of ranks, any stage.
#include <optional>

#include "core/check.h"
#include "dsengine/config.h"
#include "engine/checkpoint/load_checkpoint.h"
#include "engine/checkpoint/run_state.h"
#include "engine/checkpoint/save_checkpoint.h"
#include "engine/order/call_order.h"
#include "loops/sharded_state.h"

namespace ds::loops {
namespace {

// A run without counters, schedule and loader: these are the program's.
struct NoRun {
  NoRun() { config.zero_optimization.stage = 3; }
  engine::config::DsConfig config;
  engine::Progress progress;
  std::optional<optimizers::LossScaler> loss_scaler;

  engine::RunState state() { return {.config = config, .progress = progress, .loss_scaler = loss_scaler}; }
};

}  // namespace

std::string save_state(const ShardedModel& model, const std::string& folder, const std::string& tag) {
  require(!tag.empty(), "save: expected a tag, the name of the folder in ", folder, ", found none; \"step100\", say");
  NoRun run;
  engine::Saves saves;
  return engine::save_checkpoint(model.state(), run.state(), saves, {.save_dir = folder, .tag = tag, .options = {}});
}

void load_state(ShardedModel& model, const std::string& folder, const std::string& tag) {
  model.slices_changed();  // what is whole is of the values before
  NoRun run;
  engine::CallOrder order;
  const engine::LoadedCheckpoint loaded = engine::load_checkpoint(
      model.state(), run.state(), order, {.load_dir = folder, .tag = tag, .options = {.load_module_only = true}});
  require<IoError>(static_cast<bool>(loaded), "load: expected a checkpoint in ", folder, ", found none");
}

}  // namespace ds::loops
