// What an Engine is made of. Included by the engine's own files and by engine/setup, which puts it together.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "dsengine/config.h"
#include "dsengine/engine.h"
#include "dsengine/lr_scheduler.h"
#include "engine/checkpoint/run_state.h"
#include "engine/checkpoint/saves.h"
#include "engine/order/call_order.h"
#include "engine/report/batch_notes.h"
#include "engine/report/phases.h"
#include "engine/report/reporter.h"
#include "engine/state/autocast.h"
#include "engine/state/model_state.h"
#include "engine/state/model_watch.h"
#include "engine/state/moved_states.h"
#include "engine/state/parameter_values.h"
#include "engine/state/progress.h"
#include "engine/update/accumulation.h"
#include "engine/update/optimizer_step.h"
#include "engine/update/shown_gradients.h"
#include "engine/update/update.h"
#include "optim/loss_scaler.h"

namespace ds::engine {

// Order of members is order of construction; later ones refer to earlier ones. It stays where it was made.
struct Engine::Impl {
  CallOrder order;
  Progress progress;
  Phases phases{progress, order};  // before all that talks to other ranks, so that the watch ends last
  config::DsConfig config;
  ModelState state;
  std::optional<optimizers::LossScaler> loss_scaler;
  std::shared_ptr<LrScheduler> schedule;
  std::unique_ptr<Reporter> reporter;
  std::unique_ptr<Autocast> autocast;
  std::shared_ptr<DataLoader> loader;
  BatchNotes batches;  // of the running accumulation
  Saves saves;
  std::optional<ModelWatch> watch;
  std::unique_ptr<Update> update;
  std::optional<Accumulation> accumulation;
  std::optional<OptimizerStep> step;
  std::optional<ShownGradients> shown;
  std::unique_ptr<MovedStates> moved;  // between offload_states() and reload_states()
  bool warned_of_zero_grad = false;
  bool warned_of_own_accumulation = false;

  RunState run_state() { return {config, progress, loss_scaler, schedule.get(), loader.get()}; }
  // The boundary of an accumulation, whoever drove it: update, schedule, report. `loss`: that of a pipeline.
  void complete_step(const at::Tensor& loss = {});
  // Of backward() calls as many as an accumulation has micro-batches, before one step() inside of it.
  void warn_of_own_accumulation();
  // After an update that threw: as if the accumulation of so many micro-batches had not been, before which the
  // optimizer had made so many steps.
  void undo_accumulation(int64_t micro_batches, int64_t optimizer_steps) noexcept;
  // Waits for what is on its way, so that the state may be read.
  void synchronize();
  void change_master(const at::Tensor& parameter, const char* call,
                     const std::function<void(const ParameterValues& of, const at::Tensor& master)>& change);
};

}  // namespace ds::engine
