// Saving a checkpoint: every rank writes its part, rank 0 publishes; with folders of hosts, the first rank of each. And
// writing the weights of the model to one file.
#pragma once

#include <optional>
#include <string>

#include "dsengine/checkpoint.h"
#include "model/checkpoint/rank_state.h"
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

// Writes parameters, under all their names, and buffers to a safetensors file, by the first rank with this part of the
// model. Makes its folder. `from`: full values by name that the file gets in the place of the model's parameters, and
// of the buffers that it names; the first rank's count, other ranks give any. Collective; when the file cannot be
// written, every rank throws (that rank the cause, the others IoError) and an older file is left as it was. That holds
// for a `from` that does not fit, too, whose cause is a UsageError.
void save_model(const ModelState& state, const std::string& path, bool with_frozen,
                const std::optional<NamedTensors>& from = std::nullopt);

}  // namespace ds::engine
