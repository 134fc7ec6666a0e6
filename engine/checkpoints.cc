// The files that an engine writes and reads: checkpoints, and the model's weights in one file.
#include <ATen/core/grad_mode.h>

#include <filesystem>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "dsengine/engine.h"
#include "engine/engine_impl.h"
#include "model/checkpoint/load_checkpoint.h"
#include "model/checkpoint/save_checkpoint.h"

namespace ds::engine {

void Engine::wait_for_checkpoint() {
  const std::string failure = impl_->saves.finish(impl_->state.ranks);
  require<IoError>(failure.empty(), failure);
}

std::string Engine::save_checkpoint(const std::string& save_dir, const std::string& tag, const SaveOptions& options) {
  const at::NoGradGuard no_grad;
  Impl& self = *impl_;
  self.named([&] { self.order.require(Call::kSaveCheckpoint); });
  const Phases::Scope phase(self.phases, "save_checkpoint");
  if (const std::string failure = self.saves.finish(self.state.ranks); !failure.empty()) log::error(failure);
  self.named([&] { self.step->judge_late(); });
  self.synchronize();
  if (!self.order.micro_batches.at_start() && global_rank() == 0 &&
      !std::exchange(self.warned_of_unfinished_save, true)) {
    log::warning(
        "save_checkpoint() inside an accumulation, after ", self.order.micro_batches.done(), " of ",
        gradient_accumulation_steps(), " micro-batches",
        self.order.micro_batches.awaits_step() ? " and a backward()" : "",
        ": a checkpoint has no gradients. A run that loads it begins this accumulation anew, with the counters, ",
        "the random numbers and the position of the engine's loader of its beginning; data of the program's own ",
        "has to go back as far. Training goes on here as if nothing had been saved (said once)");
  }
  return engine::save_checkpoint(self.state, self.run_state(), self.saves, {save_dir, tag, options});
}

LoadedCheckpoint Engine::load_checkpoint(const std::string& load_dir, const std::string& tag,
                                         const LoadOptions& options) {
  const at::NoGradGuard no_grad;
  Impl& self = *impl_;
  const Autocast::Pause pause(self.state.ranks.device.type());  // casted copies of the weights before would stay
  const LoadRequest request{load_dir, tag, options};
  self.named([&] { self.order.require_load(request.with_states()); });
  const Phases::Scope phase(self.phases, "load_checkpoint");
  if (const std::string failure = self.saves.finish(self.state.ranks); !failure.empty()) log::error(failure);
  self.synchronize(/*judged_next=*/true);
  const auto loaded = engine::load_checkpoint(self.state, self.run_state(), self.order.consistency, request);
  if (loaded) {  // else, or where it threw, training goes on from that step
    self.step->late().forget();
    self.settings->forget_values();
  }
  self.watch->renew();
  self.accumulation_begins(/*restarted=*/true);
  return loaded;
}

std::string Engine::save_16bit_model(const std::string& folder, const std::string& filename,
                                     bool exclude_frozen_parameters) {
  const at::NoGradGuard no_grad;
  Impl& self = *impl_;
  require(!self.state.plan.gather || self.config.zero_optimization.stage3_gather_16bit_weights_on_model_save,
          "save_16bit_model: at stage 3 the weights are gathered for it; expected ",
          "zero_optimization.stage3_gather_16bit_weights_on_model_save: true, found false");
  require(self.state.pipeline_ranks() == 1, "save_16bit_model: no rank of a pipeline has the whole ",
          "model; expected save_checkpoint() and then `ds-tool checkpoint convert`");
  self.order.require(Call::kSave16BitModel);
  const Phases::Scope phase(self.phases, "save_16bit_model");
  self.named([&] { self.step->judge_late(); });
  self.synchronize();
  const std::string path = (std::filesystem::path(folder) / filename).string();
  save_model(self.state, path, !exclude_frozen_parameters);
  return path;
}

}  // namespace ds::engine
