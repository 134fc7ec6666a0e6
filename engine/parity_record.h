// The record of a run that `ds-launch parity` has started: losses, gradients and weights of the first steps, in files
// that the launcher compares with those of other runs (docs/is_my_run_right.md). parity_run.h says what these runs are.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/files/safetensors.h"
#include "core/parity/recorded_run.h"
#include "dsengine/config.h"
#include "dsengine/pipeline.h"
#include "engine/parity_run.h"
#include "engine/report/batch_tape.h"
#include "model/state/model_state.h"
#include "model/state/progress.h"

namespace ds::engine {

class Engine;

// Records the steps of one engine. Used by its thread; collective.
class ParityRecord {
 public:
  // `state` and `progress` outlive it. Throws UsageError for an engine that is not covered, IoError.
  ParityRecord(ParityRun run, const ModelState& state, const Progress& progress, const config::DsConfig& config);

  // Writes the values at the start; other runs than the first take over those of that one before, since a program may
  // draw its own anew in each process. Throws IoError where the disk has no room for the record.
  void start(Engine& engine);
  // Notes the loss of a pass; undefined: it is not known.
  void note_loss(const at::Tensor& loss) { losses_.push_back(loss.defined() ? loss.detach() : loss); }
  // Returns what forward() goes on with when the program gives it `input`.
  at::Tensor given(const at::Tensor& input);
  // Returns the next micro-batch of train_batch(), where `next` gives the program's own.
  pipeline::MicroBatch given(const pipeline::BatchSource& next);
  // To be called by Engine::step(), before and after it did what it does. The first writes the gradients of the step
  // at a boundary; the second its losses and weights, and ends the process after the last step.
  void before_step(Engine& engine);
  void after_step(Engine& engine);
  // To be called by train_batch(), between the backward passes and the update, and after it. `loss`: what it returns.
  void before_update(Engine& engine);
  void after_update(Engine& engine, const at::Tensor& loss = {});

 private:
  enum class Kind { kGradients, kWeights };
  void take_over_start(Engine& engine);
  void write_start(Engine& engine);
  void say_what_it_writes() const;
  TapePlace place(int64_t micro_batch) const;
  void open_file(int64_t step, bool with_gradients);
  void write(Engine& engine, Kind kind);
  void write_losses(Engine& engine, const at::Tensor& loss);
  // Writes down the states of the generators before the micro-batch, or sets those of the first run.
  void follow_generators();
  void end_process();

  ParityRun run_;
  const ModelState& state_;
  const Progress& progress_;
  RecordedLayout layout_;  // of the first run
  BatchTape tape_;
  std::vector<at::Tensor> first_generators_;  // states at the start
  bool draws_ = false;                        // whether the generators have left these
  std::vector<at::Tensor> losses_;            // of the running accumulation
  std::unique_ptr<SafetensorsWriter> file_;   // of the first rank of each part of a pipeline
  std::ofstream lines_;                       // of the rank that has the losses
  bool at_boundary_ = false;
  int64_t step_ = 0;
  int64_t micro_batch_ = 0;  // the one that comes next, or runs
  int64_t inputs_ = 0;       // that the running one has given to forward()
};

}  // namespace ds::engine
