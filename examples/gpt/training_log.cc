#include "training_log.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>
#include <string_view>

#include "check.h"
#include "gpt_init.h"

namespace gpt {
namespace {

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// The most memory that this process has had so far, as Linux counts it: "VmHWM:    1234 kB".
int64_t peak_resident_bytes() {
  constexpr std::string_view kKey = "VmHWM:";
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(kKey)) return std::stoll(line.substr(kKey.size())) * 1024;
  }
  throw ds::IoError("memory of this process: expected a line \"VmHWM:\" in /proc/self/status, found none");
}

}  // namespace

TrainingLog::TrainingLog(ds::engine::Engine& engine, const GptOptions& options, MetricsFile* metrics)
    : engine_(engine),
      model_(options.model),
      metrics_(metrics),
      steps_seen_(engine.global_steps()),
      lr_(engine.get_lr()) {
  if (engine.global_rank() == 0) progress_.emplace(options.steps, terminal_columns());
  engine.reset_comm_counters();
  step_begin_ = Clock::now();
}

bool TrainingLog::after_micro_batch(const at::Tensor& loss, int64_t seq_len) {
  seq_len_ = seq_len;
  const at::Tensor value = loss.detach().to(at::kDouble);
  loss_sum_ = loss_sum_.defined() ? loss_sum_ + value : value;
  ++micro_batches_;
  if (engine_.global_steps() == steps_seen_) return false;
  steps_seen_ = engine_.global_steps();
  after_step();
  loss_sum_ = at::Tensor();
  micro_batches_ = 0;
  lr_ = engine_.get_lr();
  begin_step();
  return true;
}

void TrainingLog::after_step() {
  const double loss = mean_loss();
  const double seconds = std::chrono::duration<double>(Clock::now() - step_begin_).count();
  const int64_t tokens = engine_.train_batch_size() * seq_len_;
  step_seconds_.push_back(seconds);
  if (metrics_ != nullptr) {
    metrics_->write(StepMetrics{.step = steps_seen_,
                                .loss = loss,
                                .grad_norm = engine_.get_global_grad_norm(),
                                .lr = lr_.front(),
                                .loss_scale = engine_.loss_scale(),
                                .skipped = !engine_.was_step_applied(),
                                .step_seconds = seconds,
                                .tokens_per_second = static_cast<double>(tokens) / seconds});
  }
  if (progress_) progress_->show(steps_seen_, loss, seconds, tokens);
}

double TrainingLog::mean_loss() {
  const at::Tensor own = (loss_sum_ / static_cast<double>(micro_batches_)).view({1});
  const int ranks = engine_.dp_world_size();
  at::Tensor losses = at::empty({ranks}, own.options());
  engine_.communicator().all_gather(losses, own, "loss").wait();
  losses = losses.to(at::kCPU);
  const auto* values = losses.const_data_ptr<double>();
  double sum = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    if (!std::isfinite(values[rank])) {
      if (progress_) progress_->finish();
      throw ds::Error(
          cat("step ", steps_seen_, ": the loss of rank ", rank, " is ", values[rank],
              ", expected a finite number; training has diverged: lower the learning rate, lengthen its warm-up or set "
              "gradient_clipping"));
    }
    sum += values[rank];
  }
  return sum / ranks;
}

void TrainingLog::finish() {
  if (progress_) progress_->finish();
  const RunSummary result = summary();
  if (metrics_ != nullptr) metrics_->write(result);
}

RunSummary TrainingLog::summary() const {
  const at::Tensor own =
      at::tensor({peak_resident_bytes(), engine_.model_state_bytes().total(), engine_.comm_bytes_sent()}, at::kLong)
          .to(engine_.device());
  at::Tensor all = at::empty({int64_t{3} * engine_.world_size()}, own.options());
  engine_.world().all_gather(all, own, "summary").wait();
  all = all.to(at::kCPU);
  const auto* values = all.const_data_ptr<int64_t>();
  RunSummary result{.world_size = engine_.world_size(), .median_step_seconds = median(step_seconds_)};
  for (int64_t rank = 0; rank < engine_.world_size(); ++rank) {
    result.peak_rss_bytes.push_back(values[3 * rank]);
    result.model_state_bytes.push_back(values[3 * rank + 1]);
    result.comm_bytes_sent.push_back(values[3 * rank + 2]);
  }
  result.parameters = parameter_count(model_);
  return result;
}

}  // namespace gpt
