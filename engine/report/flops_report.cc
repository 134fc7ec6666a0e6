#include "engine/report/flops_report.h"

#include <cmath>

#include "comm/agreement.h"
#include "core/check.h"
#include "core/files/atomic_file.h"
#include "core/log.h"
#include "dsengine/errors.h"

namespace ds::engine {
namespace {

double seconds_of(const std::vector<std::pair<profiling::DeviceClock::Moment, profiling::DeviceClock::Moment>>& spans) {
  double sum = 0;
  for (const auto& [from, to] : spans) sum += profiling::DeviceClock::seconds(from, to);
  return sum;
}

}  // namespace

FlopsReport::FlopsReport(const config::DsConfig& config, const ModelState& model)
    : section_(config.flops_profiler),
      batch_size_(config.train_micro_batch_size_per_gpu),
      model_(model),
      work_(*model.module),
      clock_(model.ranks.device) {
  if (!section_.output_file || model.ranks.world->rank() != 0) return;
  try {
    const AtomicFile probe(*section_.output_file);
  } catch (const IoError& error) {
    throw IoError(cat("flops_profiler.output_file: expected a file that can be written, found: ", error.what()));
  }
}

void FlopsReport::step_comes(int64_t steps) {
  profiles_ = steps == section_.profile_step && !profile_ && model_.plan.trains;  // else no step ends it
  work_.stop();
  if (!profiles_) return;
  forwards_.clear();
  backwards_.clear();
  begin_ = forward_begin_ = clock_.mark();
  work_.start();
}

void FlopsReport::backward_begins() {
  if (!profiles_) return;
  backward_begin_ = clock_.mark();
  // The time between two calls of the engine is the program's forward; a pipeline's schedule has its own.
  forwards_.emplace_back(forward_begin_, backward_begin_);
  if (!model_.plan.pipeline) work_.pause_forward(true);
}

void FlopsReport::backward_ends() {
  if (!profiles_) return;
  forward_begin_ = clock_.mark();
  backwards_.emplace_back(backward_begin_, forward_begin_);
  work_.pause_forward(false);
}

void FlopsReport::step_begins() {
  if (!profiles_) return;
  work_.stop();
  step_begin_ = clock_.mark();
}

void FlopsReport::step_ends(int64_t micro_batches) {
  if (!std::exchange(profiles_, false)) return;
  profile_.emplace(
      profiling::FlopsProfile{.modules = work_.rows(micro_batches), .unknown_operators = work_.unknown_operators()});
  const profiling::StepFlops step = facts(*profile_, micro_batches);
  profile_->text = profiling::flops_report(&step, *profile_,
                                           {.modules = {.module_depth = section_.module_depth,
                                                        .top_modules = section_.top_modules,
                                                        .detailed = section_.detailed},
                                            .host_times = model_.ranks.device.is_cpu()});
  if (model_.ranks.world->rank() == 0) tell(profile_->text);
}

profiling::StepFlops FlopsReport::facts(const profiling::FlopsProfile& profile, int64_t micro_batches) {
  const Ranks& ranks = model_.ranks;
  const Moment end = clock_.mark();
  const profiling::ModuleFlops& total = profile.modules.front();
  profiling::StepFlops step{.step = section_.profile_step + 1,
                            .world_size = ranks.world->size(),
                            .data_parallel_size = ranks.data->size(),
                            .model_parallel_size = ranks.world->size() / ranks.data->size(),
                            .batch_size = batch_size_,
                            .model_parameters = total.parameters,
                            .recompute_fwd_factor = section_.recompute_fwd_factor,
                            .step_seconds = profiling::DeviceClock::seconds(step_begin_, end),
                            .iteration_seconds = profiling::DeviceClock::seconds(begin_, end),
                            .micro_batches = micro_batches};
  const auto times = static_cast<double>(micro_batches);
  step.backward_seconds = seconds_of(backwards_) / times;
  if (!model_.plan.pipeline) step.forward_seconds = seconds_of(forwards_) / times;
  // The numbers of one copy of the model, on average.
  const profiling::ModuleWork::UsefulFlops useful = work_.useful_flops(micro_batches);
  const std::vector<int64_t> own = {total.flops, std::llround(useful.full), std::llround(useful.causal)};
  const std::vector<int64_t> all = comm::numbers_of_ranks(*ranks.world, ranks.device, own, "flops of a step");
  const auto samples = static_cast<double>(batch_size_ * step.data_parallel_size);
  of_sample_.emplace();
  for (size_t i = 0; i < all.size(); i += own.size()) {
    step.model_flops += all[i];
    of_sample_->full += static_cast<double>(all[i + 1]) / samples;
    of_sample_->causal += static_cast<double>(all[i + 2]) / samples;
  }
  step.model_flops /= step.data_parallel_size;
  if (step.model_parallel_size > 1) step.model_parameters = model_.plan.parameters.value_or(total.parameters);
  return step;
}

void FlopsReport::tell(const std::string& text) const {
  if (!section_.output_file) return log::info(text);
  try {
    write_whole_file(*section_.output_file, text, /*durable=*/false);
    log::info("flops profile of step ", section_.profile_step + 1, " written to ", *section_.output_file);
  } catch (const IoError& error) {
    log::error("flops_profiler.output_file: ", error.what());
  }
}

}  // namespace ds::engine
