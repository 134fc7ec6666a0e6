// Loading a checkpoint: finding a tag that can be read, on all ranks together.
#pragma once

#include <string>

#include "config/order/call_order.h"
#include "dsengine/checkpoint.h"
#include "model/checkpoint/checkpoint_fit.h"
#include "model/checkpoint/run_state.h"
#include "model/state/model_state.h"

namespace ds::engine {

// A call that loads a checkpoint.
struct LoadRequest {
  std::string load_dir;
  std::string tag;  // empty: what `latest` names, or the whole one with the latest step
  LoadOptions options;
  FitHints hints = {};
  bool over = false;  // of load_weights(): what the source lacks stays
  bool with_states() const { return !options.load_module_only && options.load_optimizer_states; }
};

// A call that loads weights over those that are there.
struct WeightsRequest {
  std::string path;
  bool strict = true;
};

// Loads the weights and buffers that a file has; all others stay. Like load_checkpoint() in all else; see
// Engine::load_weights for what it returns and throws.
WeightsReport load_weights(const ModelState& model, ModelConsistency& consistency, const WeightsRequest& request);

// Loads a checkpoint. To be called between optimizer steps, with nothing on its way and no save in flight.
// `consistency` is told when the model is a mixture, and when not any more. Collective; see Engine::load_checkpoint for
// what it returns and throws.
LoadedCheckpoint load_checkpoint(const ModelState& model, const RunState& run, ModelConsistency& consistency,
                                 const LoadRequest& request);

}  // namespace ds::engine
