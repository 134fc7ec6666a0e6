#include "model/offloaded/speculative_update.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "core/without_stack.h"

namespace ds::engine {

int64_t SpeculationGate::step(SpeculationOutcome outcome) {
  switch (outcome) {
    case SpeculationOutcome::kNone:
      ++without_;
      if (pause_left_ > 0) --pause_left_;
      return 0;
    case SpeculationOutcome::kStood:
      ++stood_;
      failures_in_a_row_ = 0;
      next_pause_ = kPause;
      return 0;
    case SpeculationOutcome::kRolledBack:
      break;
  }
  ++rolled_back_;
  if (++failures_in_a_row_ < kFailures) return 0;
  ++pauses_;
  pause_left_ = next_pause_;
  next_pause_ = std::min(2 * next_pause_, kLongestPause);
  return pause_left_;
}

SpeculativeUpdate::SpeculativeUpdate(offload::HostGradients& gradients, SpeculationMemory memory)
    : gradients_(gradients), memory_(std::move(memory)), updates_(memory_.weights.size()) {
  ensure(memory_.undo.size() == memory_.weights.size(), "there is memory to go back for every bucket with new weights");
  for (std::vector<at::Tensor>& tensors : memory_.undo) undo_.emplace_back(std::move(tensors));
  memory_.undo.clear();
}

SpeculativeUpdate::~SpeculativeUpdate() { roll_back(); }

void SpeculativeUpdate::add(size_t bucket, const at::Tensor& own) {
  ensure(!begun() || (arriving_ && !updates_.at(bucket)), "a gradient whose update has begun is complete");
  {
    const std::lock_guard lock(gradients_mutex_);
    gradients_.add(bucket, own);
  }
  if (begun()) updates_[bucket] = worker_.push([this, bucket] { update(bucket); });
}

at::Tensor SpeculativeUpdate::gradient(size_t bucket) {
  std::unique_lock lock(gradients_mutex_);
  TransferStream::Mark arrival = gradients_.arrival(bucket);
  lock.unlock();  // backward adds others meanwhile
  TransferStream::wait_on_host(arrival);
  lock.lock();
  return gradients_.gradient(bucket);
}

void SpeculativeUpdate::clear() {
  roll_back();
  gradients_.clear();
}

void SpeculativeUpdate::begin(optimizers::SliceOptimizer& optimizer, double gradient_scale,
                              std::function<void(const at::Tensor& gradient)> prepare) {
  ensure(!begun(), "one speculative update runs at a time");
  optimizer.begin_step();
  step_ = Step{.optimizer = &optimizer,
               .gradient_scale = gradient_scale,
               .prepare = std::move(prepare),
               .groups = optimizer.groups(),
               .step_count = optimizer.step_count()};
  arriving_ = true;
}

bool SpeculativeUpdate::fits(double gradient_scale) const {
  return begun() && gradient_scale == step_->gradient_scale && step_->optimizer->groups() == step_->groups &&
         step_->optimizer->step_count() == step_->step_count;
}

// On the worker's thread.
void SpeculativeUpdate::update(size_t bucket) {
  if (dropped_) return;
  const at::NoGradGuard no_grad;
  const auto index = static_cast<int64_t>(bucket);
  optimizers::SliceOptimizer& optimizer = *step_->optimizer;
  at::Tensor present = gradient(bucket);
  if (memory_.gradient.defined()) present = memory_.gradient.narrow(0, 0, present.numel()).copy_(present);
  if (step_->prepare) step_->prepare(present);
  std::vector<at::Tensor> changes = {optimizer.slice(index).master};
  for (auto& [name, state] : optimizer.states(index)) changes.push_back(std::move(state));
  undo_[bucket].keep(std::move(changes));
  optimizer.update_into(index, present, step_->gradient_scale, memory_.weights[bucket]);
}

// Until no update runs. Returns what the first of them threw.
std::exception_ptr SpeculativeUpdate::wait() noexcept {
  std::exception_ptr failure;
  for (auto& update : updates_) {
    if (!update) continue;
    try {
      std::exchange(update, nullptr)->wait();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  return failure;
}

void SpeculativeUpdate::restore() {
  for (offload::UndoCopy& copy : undo_) copy.restore();
}

bool SpeculativeUpdate::accept(const std::function<void(size_t bucket, const at::Tensor& weights)>& publish) {
  ensure(begun(), "a speculative update is accepted once");
  const std::exception_ptr failure = wait();
  bool complete = !failure;
  for (size_t b = 0; b < undo_.size(); ++b) complete = complete && undo_[b].holds() == memory_.weights[b].defined();
  step_.reset();
  if (!complete) {
    restore();
    try {
      if (failure) std::rethrow_exception(failure);
    } catch (const std::exception& error) {
      log::warning("a speculative update (super_offload) failed and is done again: ", without_stack(error.what()));
    }
    return false;
  }
  for (offload::UndoCopy& copy : undo_) copy.forget();
  for (size_t b = 0; b < undo_.size(); ++b) {
    if (memory_.weights[b].defined()) publish(b, memory_.weights[b]);
  }
  return true;
}

void SpeculativeUpdate::roll_back() noexcept {
  if (!begun()) return;
  dropped_ = true;
  wait();
  dropped_ = false;
  restore();
  optimizers::SliceOptimizer& optimizer = *step_->optimizer;
  if (optimizer.step_count() == step_->step_count) optimizer.set_step_count(step_->step_count - 1);
  arriving_ = false;
  step_.reset();
}

}  // namespace ds::engine
