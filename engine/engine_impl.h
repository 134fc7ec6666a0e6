// The parts of an Engine. Included by the engine's own files and by engine/setup, which puts it together.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "config/order/call_order.h"
#include "core/device/transfer_stream.h"
#include "core/making_process.h"
#include "dsengine/config.h"
#include "dsengine/engine.h"
#include "dsengine/errors.h"
#include "dsengine/optimizer.h"
#include "engine/make_sampler.h"
#include "engine/parity_record.h"
#include "engine/report/batch_notes.h"
#include "engine/report/comms_report.h"
#include "engine/report/reporter.h"
#include "engine/update/optimizer_step.h"
#include "engine/update/replica_watch.h"
#include "engine/update/scaled_backward.h"
#include "engine/update/shared_batches.h"
#include "engine/update/shown_gradients.h"
#include "engine/update/step_settings.h"
#include "engine/update/update.h"
#include "model/checkpoint/run_state.h"
#include "model/checkpoint/saves.h"
#include "model/state/autocast.h"
#include "model/state/model_state.h"
#include "model/state/model_watch.h"
#include "model/state/moved_states.h"
#include "model/state/parameter_values.h"
#include "model/state/progress.h"
#include "optim/loss_scaler.h"

namespace ds::engine {

// Order of members is order of construction; later ones refer to earlier ones. It stays where it was made.
struct Engine::Impl {
  MakingProcess process;
  CallOrder order;
  Progress progress;
  Phases phases{progress, order.micro_batches};  // before all that talks to other ranks, so that the watch ends last
  config::DsConfig config;
  std::optional<CommsReport> comms;  // comms_logger
  ModelState state;
  WeightsReport start_weights;  // what .weights and the model did not have in common
  std::optional<optimizers::LossScaler> loss_scaler;
  std::shared_ptr<LrScheduler> schedule;
  std::unique_ptr<Reporter> reporter;
  std::unique_ptr<Autocast> autocast;
  std::shared_ptr<DataLoader> loader;
  std::shared_ptr<BatchSampler> sampler;  // the loader's, or what the program has asked for
  std::optional<TransferStream> inputs;   // what the program gives, to the device
  BatchNotes batches;                     // of the running accumulation
  SharedBatches shared_batches;           // what the program has cut over ranks that share a batch
  bool cuts_sequences = false;            // InitializeOptions::cuts_sequences
  AccumulationStart accumulation_start;
  int64_t accumulations = 0;  // that have begun, undone ones too
  Saves saves;
  std::optional<ModelWatch> watch;
  std::unique_ptr<Update> update;
  std::optional<ScaledBackward> scaled_backward;
  std::optional<StepSettings> settings;
  std::optional<OptimizerStep> step;
  std::optional<ReplicaWatch> replicas;
  std::optional<ShownGradients> shown;
  std::unique_ptr<ParityRecord> parity;  // null: ds-launch parity has not started the program
  std::unique_ptr<MovedStates> moved;    // between offload_states() and reload_states()
  bool warned_of_zero_grad = false;
  bool warned_of_own_accumulation = false;
  bool warned_of_short_update = false;
  bool divides_loss = true;  // whether the last backward() divided it by gradient_accumulation_steps
  bool warned_of_unfinished_save = false;
  // Whether the program has asked for what these sections make, which the engine cannot do by itself.
  struct Asked {
    bool curriculum = false;
    bool layer_drop = false;
    bool token_drop = false;
    bool sparse_attention = false;
    bool data_sampler = false;
  } asked;

  SamplerPlace sampler_place() const;
  RunState run_state() {
    const bool unfinished = !order.micro_batches.at_start();
    return {.config = config,
            .progress = progress,
            .loss_scaler = loss_scaler,
            .schedule = schedule.get(),
            .sampler = sampler.get(),
            .unfinished_micro_batches = order.micro_batches.done(),
            .start = unfinished ? &accumulation_start : nullptr};
  }
  // Notes that the first micro-batch of an accumulation comes next.
  // `restarted`: from another state than the last step left.
  void accumulation_begins(bool restarted = false) {
    accumulation_start = engine::accumulation_start(state, sampler.get());
    ++accumulations;
    if (restarted) {
      scaled_backward->counts().forget();  // also those of a first micro-batch that failed
      reporter->step_comes(progress.global_steps);
    }
    follow_compression(restarted);
  }
  // Calls `action`; of several engines, what it throws says whose it is.
  template <class Action>
  auto named(const Action& action) {
    try {
      return action();
    } catch (const UsageError& error) {
      throw UsageError(with_engine(error.what()));
    } catch (const NonFiniteError& error) {
      throw NonFiniteError(with_engine(error.what()));
    }
  }
  std::string with_engine(const std::string& message) const;
  // Lets compressed layers go on with the step; see dsengine/model_compression.h. Collective.
  void follow_compression(bool restarted);
  // Shows the gradients of the step that comes to compressed layers whose masks follow from them. Collective.
  void show_gradients_to_compression();
  // Ends an accumulation at its boundary, whoever drove it: update, schedule, report. `loss`: that of a pipeline.
  void complete_step(const at::Tensor& loss = {});
  // Counts the micro-batch that backward() has ended, and ends the accumulation at its boundary: Engine::step().
  void make_step();
  // Throws where a step at a boundary has to be refused, and leaves all as it was. Takes over what the program has
  // changed. `call`: the call to name.
  void require_step(const char* call);
  // Waits for what is on its way, so that the state may be read. `judged_next` as of LateStep::read().
  void synchronize(bool judged_next = false);
  // Does so once the last step is judged.
  void synchronize_judged() {
    named([&] {
      step->judge_late();
      replicas->judge();
    });
    synchronize();
  }
  // Returns what this rank has of the reduced gradient of the parameter's bucket, before step(). `call`: the call to
  // name. Collective.
  at::Tensor reduced_gradient(const ParameterValues& values, const char* call);
  // Returns the same once all backward passes of a step are over, whoever drives it. Collective.
  at::Tensor finished_gradient(const ParameterValues& values, const char* call);
};

// Gives functions of ours that take engines their insides.
struct EngineAccess {
  static Engine::Impl& impl_of(Engine& engine) { return *engine.impl_; }
};

}  // namespace ds::engine
