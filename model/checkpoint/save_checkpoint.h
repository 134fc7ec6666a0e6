// Saving a checkpoint: every rank writes its part, rank 0 publishes; with folders of hosts, the first rank of each.
#pragma once

#include <string>

#include "dsengine/checkpoint.h"
#include "model/checkpoint/run_state.h"
#include "model/checkpoint/saves.h"
#include "model/state/model_state.h"

namespace ds::engine {

// A call that saves a checkpoint.
struct SaveRequest {
  std::string save_dir;
  std::string tag;  // empty: "global_step<N>"
  SaveOptions options;
};

// Saves a checkpoint and returns the path of the tag's folder. To be called between optimizer steps, with nothing on
// its way and no save in flight. Collective; see Engine::save_checkpoint for what it throws.
std::string save_checkpoint(const ModelState& model, const RunState& run, Saves& saves, const SaveRequest& request);

}  // namespace ds::engine
