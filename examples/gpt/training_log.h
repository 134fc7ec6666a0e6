// The log of a training run: progress on rank 0, metrics, the check that the loss is a number.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include <dsengine/engine.h>

#include "gpt_options.h"
#include "metrics_file.h"
#include "progress_bar.h"

namespace gpt {

// One per rank. Its collectives are one small all_gather per optimizer step and one at the end. Not thread safe.
class TrainingLog {
 public:
  // Timing of the first step starts here, after a checkpoint was loaded. `metrics` is null without --metrics and on
  // ranks other than 0. `engine` outlives this.
  TrainingLog(ds::engine::Engine& engine, const GptOptions& options, MetricsFile* metrics);

  // After engine.step() of each micro-batch, with its loss and the length of its sequences, or after train_batch(),
  // with the step's. Throws ds::Error naming step and rank when a loss is not finite, on every rank alike. Returns
  // whether it ended an optimizer step.
  bool after_micro_batch(const at::Tensor& loss, int64_t seq_len);
  // Starts the clock of the next step anew, after work between steps that is none of it.
  void begin_step() { step_begin_ = Clock::now(); }
  // Ends the progress line and writes the summary.
  void finish();

 private:
  void after_step();
  double mean_loss();
  RunSummary summary() const;

  using Clock = std::chrono::steady_clock;
  ds::engine::Engine& engine_;
  int64_t seq_len_ = 0;  // of the step
  GptConfig model_;
  MetricsFile* metrics_;
  std::optional<ProgressBar> progress_;  // rank 0
  at::Tensor loss_sum_;                  // over the micro-batches of this step; stays on the device
  int64_t micro_batches_ = 0;
  int64_t steps_seen_ = 0;
  std::vector<double> lr_;  // that the next step runs with
  Clock::time_point step_begin_;
  std::vector<double> step_seconds_;
};

}  // namespace gpt
