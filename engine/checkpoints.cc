// The files that an engine writes and reads: checkpoints, and the model's weights in one file.
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "checkpoint/block_checksum.h"
#include "comm/agreement.h"
#include "core/check.h"
#include "core/log.h"
#include "dsengine/engine.h"
#include "engine/engine_impl.h"
#include "model/checkpoint/load_checkpoint.h"
#include "model/checkpoint/save_checkpoint.h"
#include "model/checkpoint/save_model.h"
#include "model/state/axes.h"
#include "model/state/tensor_parts.h"

namespace ds::engine {
namespace {

// Returns the rates of all groups; none where an optimizer of the program's own class does not say them.
std::vector<double> known_rates(const ModelOptimizer& optimizer) {
  try {
    return optimizer.learning_rates();
  } catch (const c10::Error&) {
    return {};
  }
}

// Warns where a load has brought the rates that the program's own schedule has set: torch's schedulers have no state
// that could be saved. `before`: the rates before the load.
void warn_of_own_schedule(const Engine::Impl& engine, const std::vector<double>& before) {
  const std::vector<double> rates = known_rates(engine.state.optimizer);
  const auto differs = std::mismatch(rates.begin(), rates.end(), before.begin(), before.end()).first;
  if (!engine.state.optimizer.client || engine.schedule || engine.state.ranks.world->rank() != 0 ||
      differs == rates.end()) {
    return;
  }
  const auto group = static_cast<size_t>(differs - rates.begin());
  log::warning("load_checkpoint: parameter group ", group, " of the program's optimizer has the lr ", *differs,
               " of the checkpoint now, in place of ", before[group],
               ". A checkpoint cannot know a scheduler that the ",
               "program steps, which begins anew and would set other rates than the run that saved. Give a ",
               "torch::optim::LRScheduler to initialize() as .torch_scheduler, and take the config's ",
               "ReduceLROnPlateau in place of torch::optim::ReduceLROnPlateauScheduler");
}

bool same_on(comm::Communicator& ranks, c10::Device device, uint64_t digest) {
  const auto number = static_cast<int64_t>(digest >> 1);
  return comm::same_number_on_all_ranks(number, device, ranks, "what ranks changed before a save");
}

// Throws UsageError on all ranks where some have changed or frozen parameters otherwise than others since they were
// compared last, in a step or a save: each writes a part of the file, which would be of several models. Without an
// optimizer there are no steps, and check_replicas compares here, too. Collective.
void require_same_changes(Engine::Impl& engine, const char* call) {
  const ModelState& state = engine.state;
  const Ranks& ranks = state.ranks;
  if (ranks.world->size() == 1) return;
  const ModelWatch::Digests changes = engine.watch->take_digests();
  const std::string name = engine.watch->take_name();
  bool same = ranks.part->size() == 1 || same_on(*ranks.part, ranks.device, changes.all);
  for (const Axis& axis : state.axes->list) {
    if (axis.same_data != nullptr) same = same_on(*axis.same_data->ranks, ranks.device, changes.axis) && same;
  }
  if (largest_of_ranks(same ? 0 : 1, ranks.device, *ranks.world, "whether ranks changed the same before a save") != 0) {
    engine.order.consistency.slice_updated();  // what each rank has is no longer one model
    const std::string own = changes.all == 0 ? "no parameter changed"
                            : name.empty()
                                ? "frozen parameters"
                                : cat("changed ", name, " (values ", checkpoint::to_hex(changes.all).substr(12), ")");
    std::string list;
    const std::vector<std::string> texts =
        comm::texts_of_ranks(own, ranks.device, *ranks.world, "what ranks say of a save");
    for (size_t rank = 0; rank < texts.size(); ++rank) {
      list += cat(rank == 0 ? "" : "; ", "rank ", rank, ": ", texts[rank]);
    }
    throw UsageError(cat(call, ": the ranks have changed or frozen parameters in different ways, so that their models ",
                         "are not the same any more, and each of them would write a part. ", list, ". Load the same ",
                         "values on every rank, or change them in a scope of engine->gathered_parameters(parameters, ",
                         "/*modifier_rank=*/0); load_checkpoint() makes the ranks one again"));
  }
  if (state.plan.trains) return;
  engine.replicas->step_made(0);
  engine.replicas->judge();
}

}  // namespace

void Engine::wait_for_checkpoint() {
  const Phases::Scope phase(impl_->phases, "wait_for_checkpoint");
  const std::string failure = impl_->saves.finish(impl_->state.ranks);
  require<IoError>(failure.empty(), failure);
}

std::string Engine::save_checkpoint(const std::string& save_dir, const std::string& tag, const SaveOptions& options) {
  const at::NoGradGuard no_grad;
  Impl& self = *impl_;
  self.named([&] { self.order.require(Call::kSaveCheckpoint); });
  const Phases::Scope phase(self.phases, "save_checkpoint");
  if (const std::string failure = self.saves.finish(self.state.ranks); !failure.empty()) log::error(failure);
  self.synchronize_judged();
  self.named([&] { require_same_changes(self, "save_checkpoint()"); });
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
  const std::vector<double> rates = known_rates(self.state.optimizer);
  const auto loaded = engine::load_checkpoint(self.state, self.run_state(), self.order.consistency, request);
  if (loaded) {  // else, or where it threw, training goes on from that step
    self.step->late().forget();
    self.replicas->forget();
    self.settings->forget_values();
    self.settings->note_states();
    std::ignore = self.watch->take_digests();  // whatever was changed, all ranks have what was loaded
    warn_of_own_schedule(self, rates);
  }
  self.watch->renew();
  self.accumulation_begins(/*restarted=*/true);
  return loaded;
}

WeightsReport Engine::load_weights(const std::string& path, bool strict) {
  const at::NoGradGuard no_grad;
  Impl& self = *impl_;
  const Autocast::Pause pause(self.state.ranks.device.type());  // casted copies of the weights before would stay
  self.named([&] { self.order.require(Call::kLoadWeights); });
  const Phases::Scope phase(self.phases, "load_weights");
  if (const std::string failure = self.saves.finish(self.state.ranks); !failure.empty()) log::error(failure);
  self.synchronize_judged();
  WeightsReport report = engine::load_weights(self.state, self.order.consistency, {path, strict});
  self.settings->forget_values();
  self.watch->renew();
  self.accumulation_begins(/*restarted=*/true);
  return report;
}

const WeightsReport& Engine::start_weights() const { return impl_->start_weights; }

std::string Engine::save_weights(const std::string& path, const SaveWeightsOptions& options) {
  const at::NoGradGuard no_grad;
  Impl& self = *impl_;
  self.order.require(Call::kSaveWeights);
  if (options.masters) self.order.scopes.require_own_weights("save_weights() with masters");
  const Phases::Scope phase(self.phases, "save_weights");
  self.synchronize_judged();
  self.named([&] { require_same_changes(self, "save_weights()"); });
  save_chosen(self.state, path, options);
  return path;
}

std::string Engine::save_fp32_model(const std::string& folder, const std::string& filename) {
  const at::NoGradGuard no_grad;
  Impl& self = *impl_;
  self.order.require(Call::kSaveFp32Model);
  const Phases::Scope phase(self.phases, "save_fp32_model");
  self.synchronize_judged();
  self.named([&] { require_same_changes(self, "save_fp32_model()"); });
  const std::string path = (std::filesystem::path(folder) / filename).string();
  engine::save_fp32_model(self.state, path);
  return path;
}

std::string Engine::save_16bit_model(const std::string& folder, const std::string& filename,
                                     bool exclude_frozen_parameters, const std::optional<StateDict>& from) {
  const at::NoGradGuard no_grad;
  Impl& self = *impl_;
  self.order.require(Call::kSave16BitModel);
  const Phases::Scope phase(self.phases, "save_16bit_model");
  const bool given = largest_of_ranks(from ? 1 : 0, self.state.ranks.device, *self.state.ranks.world,
                                      "whether a state dict is saved") == 1;
  require(given || !self.state.plan.gather || self.config.zero_optimization.stage3_gather_16bit_weights_on_model_save,
          "save_16bit_model: at stage 3 the weights are gathered for it; expected ",
          "zero_optimization.stage3_gather_16bit_weights_on_model_save: true, found false");
  self.synchronize_judged();
  if (!given) self.named([&] { require_same_changes(self, "save_16bit_model()"); });
  const std::string path = (std::filesystem::path(folder) / filename).string();
  save_model(self.state, path, !exclude_frozen_parameters, given ? std::optional(from.value_or(StateDict())) : from);
  return path;
}

}  // namespace ds::engine
