// The record of a run that `ds-launch parity` has started: losses, gradients and weights of the first steps, in files
// that the launcher compares with those of another run (docs/is_my_run_right.md).
//
// Note [One rank in the place of many]
// The reference is the same program on one rank. Its accumulation is as many times longer as the other run has
// data-parallel ranks, so that a step takes the same global batch: micro-batch i stands for rank i % ranks. The default
// generators have a state for each of these ranks, seeded as theirs, and change between micro-batches: what a program
// draws for batches and dropout is what the ranks have drawn. The engine's loader gives the samples of a global batch
// in any case.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/files/safetensors.h"
#include "dsengine/config.h"
#include "model/state/model_state.h"
#include "model/state/progress.h"

namespace ds::engine {

class Engine;

// What is recorded, and where.
struct ParityRun {
  std::string folder;
  config::ConfigSource source;  // the ds_config that both runs begin with
  int64_t steps = 0;
  std::string like;           // the folder of the other run; empty: this is not the reference
  bool ends_process = false;  // after the last step
  // Reads the variables that ds-launch has set; nothing: the process is no part of such a run. Throws ConfigError for
  // values that are none.
  static std::optional<ParityRun> from_environment();

  // The ds_config of this run: `source` or, for the reference, with the batches of the other run on one rank. Throws
  // ConfigError, naming the key, for what a single rank cannot repeat.
  config::ConfigSource config() const;
};

// Records the steps of one engine. Used by its thread; collective.
class ParityRecord {
 public:
  // `state` and `progress` outlive it. `seed` seeds the generators as those of a data-parallel rank; null: initialize()
  // has not seeded them. Throws UsageError for a model that is not covered, IoError.
  ParityRecord(ParityRun run, const ModelState& state, const Progress& progress, const config::DsConfig& config,
               const std::function<void(int rank)>& seed);

  // Writes the values at the start; the reference takes over those of the other run first, since a program may draw its
  // own anew in each process.
  void start(Engine& engine);
  // Notes the loss of a pass; undefined: it is not known.
  void note_loss(const at::Tensor& loss) { losses_.push_back(loss.defined() ? loss.detach() : loss); }
  // To be called by Engine::step(), before and after it did what it does. The first writes the gradients of the step
  // at a boundary; the second its losses and weights, and ends the process after the last step.
  void before_step(Engine& engine);
  void after_step(Engine& engine);

 private:
  enum class Kind { kGradients, kWeights };
  void take_over_start(Engine& engine);
  void write_start(Engine& engine);
  void open_file(int64_t step, bool with_gradients);
  void write(Engine& engine, Kind kind);
  void write_losses(Engine& engine);
  void take_turn();  // gives the generators the state of the next rank that this one stands for
  void end_process();

  ParityRun run_;
  const ModelState& state_;
  const Progress& progress_;
  int64_t stands_for_ = 1;  // the ranks of Note [One rank in the place of many]
  int64_t turn_ = 0;
  std::vector<std::vector<at::Tensor>> streams_;  // by rank: states of the generators
  std::vector<at::Tensor> losses_;                // of the running accumulation
  std::unique_ptr<SafetensorsWriter> file_;       // of rank 0
  std::ofstream lines_;                           // of the first rank of a tensor axis
  bool at_boundary_ = false;
  int64_t step_ = 0;
};

}  // namespace ds::engine
