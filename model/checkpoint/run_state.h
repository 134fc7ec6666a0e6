// The state of a run beside its model: what a checkpoint keeps of it, and a load goes on from.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>

#include "checkpoint/source/training_state.h"
#include "data/batch_sampler.h"
#include "dsengine/checkpoint.h"
#include "dsengine/config.h"
#include "dsengine/optimizer.h"
#include "model/checkpoint/rank_state.h"
#include "model/state/model_state.h"
#include "model/state/progress.h"
#include "optim/loss_scaler.h"

namespace ds::engine {

// The position of a run when an accumulation begins, from which a checkpoint that is saved inside of it goes on.
struct AccumulationStart {
  std::optional<SamplerState> data;  // position of the engine's sampler
  NamedTensors generators;           // generator_states()
};
AccumulationStart accumulation_start(const ModelState& model, const BatchSampler* sampler);

// The parts of a run that saving and loading use. All of them outlive the object.
struct RunState {
  const config::DsConfig& config;
  Progress& progress;
  std::optional<optimizers::LossScaler>& loss_scaler;
  LrScheduler* schedule = nullptr;  // null: constant rates
  BatchSampler* sampler = nullptr;  // null: the program's own data
  // The micro-batches of the running accumulation so far, which a checkpoint leaves out, and where it began (null
  // between accumulations).
  int64_t unfinished_micro_batches = 0;
  const AccumulationStart* start = nullptr;
};

checkpoint::TrainingState training_state(const ModelState& model, const RunState& run,
                                         const nlohmann::json& client_state);

// Which states of a checkpoint a run goes on from.
struct TakenStates {
  bool with_optimizer = true;    // groups and step count; states are read already
  bool with_schedule = true;     // false: its values are made again for the groups
  bool with_rank_states = true;  // the optimizer's memory of this rank alone has been read
};

// Takes over counters, loss scale, groups of the optimizer, schedule and position in the data. Warns where they do not
// fit.
void take_run_state(const ModelState& model, const RunState& run, const checkpoint::Source& source,
                    const TakenStates& taken);

}  // namespace ds::engine
