#include "engine/update/update.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "model/state/row_wise.h"
#include "optim/device_update.h"
#include "optim/row_update.h"
#include "zero/partition.h"

namespace ds::engine {
namespace {

// Returns the segments of this rank's part of the bucket whose parameters the program has frozen since initialize().
std::vector<Segment> frozen_segments(const ModelState& state, size_t bucket) {
  const zero::BucketLayout& layout = state.buckets[bucket].layout();
  std::vector<Segment> segments = state.plan.partition_optimizer
                                      ? zero::slice_segments(layout, state.groups_of(bucket).shards.rank())
                                      : layout.segments;
  std::erase_if(segments, [&](const Segment& segment) { return !state.is_held_still(segment.parameter); });
  return segments;
}

// Values around the update of one bucket of parameters that the program has frozen since initialize
// (set_requires_grad(false)): the update leaves their masters, states and weights as they are, where it would move them
// by momentum and decay.
class FrozenValues {
 public:
  // Whether the bucket has such parameters.
  static bool wanted(const ModelState& state, size_t bucket) {
    const std::vector<Segment>& segments = state.buckets[bucket].layout().segments;
    return std::any_of(segments.begin(), segments.end(),
                       [&](const Segment& segment) { return state.is_held_still(segment.parameter); });
  }

  // Keeps copies of their values in this rank's part. `own`: what of the bucket's weights this rank updates.
  FrozenValues(const ModelState& state, size_t bucket, const at::Tensor& own) {
    const std::vector<Segment> segments = frozen_segments(state, bucket);
    if (segments.empty()) return;
    const at::Tensor& master = state.masters[bucket];
    std::vector<at::Tensor> tensors = {master};
    if (!own.is_alias_of(master)) tensors.push_back(own);
    for (const auto& [name, values] : state.optimizer.states(bucket)) {
      ensure(values.numel() == master.numel(), "states of an optimizer that holds parameters still are flat slices");
      tensors.push_back(values);
    }
    for (const at::Tensor& tensor : tensors) {
      for (const Segment& segment : segments) {
        const at::Tensor part = tensor.narrow(0, segment.slice_offset, segment.length);
        kept_.emplace_back(part, part.clone());
      }
    }
  }

  void restore() const {
    for (const auto& [part, values] : kept_) part.copy_(values);
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;  // a part of a tensor, and the values it held
};

}  // namespace

void require_freezing_possible(const ModelState& state) {
  const auto frozen = std::find(state.held_still.begin(), state.held_still.end(), 1);
  if (frozen == state.held_still.end() || !state.optimizer.own) return;
  const std::string& name = state.parameters[static_cast<size_t>(frozen - state.held_still.begin())].name;
  const zero::Offload& offload = state.plan.offload;
  const char* reason = offload.delayed                          ? "delayed_update"
                       : offload.speculative                    ? "super_offload"
                       : offload.optimizer == zero::Home::kFile ? "offload_optimizer to files"
                       : state.plan.error_feedback              ? "an optimizer that compresses momenta"
                                                                : nullptr;
  require(reason == nullptr, "step(): parameter ", name, " was frozen after initialize(), which ", reason,
          " cannot follow: it would go on moving by its momentum. Freeze it before initialize()");
}

double SliceSteps::factor(double gradient_scale) const {
  // A compressed exchange takes the mean over ranks where the program wants the sum.
  const bool sums = state_.gradients.reducer->keeps_local() && !state_.plan.average_gradients;
  return sums ? gradient_scale * state_.ranks.groups.shards->size() : gradient_scale;
}

void SliceSteps::clip_by_value(const at::Tensor& gradient, const optimizers::StepScale& scale) const {
  if (state_.plan.clip_value <= 0) return;
  // With the loss scale still in it: without it small values may be lost to float16.
  const double bound = state_.plan.clip_value / scale.factor;
  if (scale.device_factor.defined()) {
    const at::Tensor limit =
        scale.device_factor.reciprocal().mul_(bound).squeeze();  // infinite in float16: clips nothing
    gradient.clamp_(limit.neg(), limit);
    return;
  }
  constexpr double kLargestHalf = 65504.0;
  if (gradient.scalar_type() != at::kHalf || bound < kLargestHalf) gradient.clamp_(-bound, bound);
}

void SliceSteps::update(size_t b, double gradient_scale, const UpdateInto& update_into) {
  const at::Tensor gradient = state_.gradients.reducer->gradient(b);
  clip_by_value(gradient, {.factor = gradient_scale, .device_factor = {}, .skip = {}});
  const zero::ParameterBucket& bucket = state_.buckets[b];
  const at::Tensor own = state_.own_part(b);
  const bool is_master = own.is_alias_of(state_.masters[b]);
  bucket.kept_slice().use(/*changes=*/true, [&] {
    const std::optional<FrozenValues> still =
        FrozenValues::wanted(state_, b) ? std::optional<FrozenValues>(std::in_place, state_, b, own) : std::nullopt;
    if (is_master) {
      state_.optimizer.own->update(static_cast<int64_t>(b), gradient, gradient_scale);
    } else {
      update_into(gradient, own);
    }
    consistency_.slice_updated();
    if (still) still->restore();
  });
  state_.access->updated(b);
}

void SliceSteps::on_host(size_t b, double gradient_scale) {
  update(b, gradient_scale, [&](const at::Tensor& gradient, const at::Tensor& own) {
    state_.offloaded->update(*state_.optimizer.own, b, gradient, gradient_scale, own);
  });
}

void SliceSteps::on_device(size_t b, const optimizers::StepScale& scale) {
  optimizers::require_host_scale(scale);
  update(b, scale.factor, [&](const at::Tensor& gradient, const at::Tensor& own) {
    state_.optimizer.own->update_into(static_cast<int64_t>(b), gradient, scale.factor, own);
  });
}

// A table that the program has frozen makes a step without rows: others may count it, and wait for its rows.
void SliceSteps::on_rows(size_t b, const optimizers::StepScale& scale) {
  optimizers::require_host_scale(scale);
  TableRows own = own_rows(state_, b);
  if (state_.is_held_still(state_.buckets[b].layout().segments.front().parameter)) {
    own = {.rows = own.rows.narrow(0, 0, 0), .values = own.values.narrow(0, 0, 0)};
  }
  clip_by_value(own.values, scale);
  auto* const optimizer = dynamic_cast<optimizers::RowOptimizer*>(state_.optimizer.own.get());
  ensure(optimizer != nullptr, "tables are row-wise where the optimizer updates rows");
  optimizer->update_rows(static_cast<int64_t>(b), own, scale.factor);
  consistency_.slice_updated();
  state_.access->updated_rows(b, own.rows);
}

// Slices on a GPU are always loaded: one launch updates them all, and they are published after it. Elsewhere a bucket
// travels while the next one is updated.
void SliceSteps::all_on_device(const optimizers::StepScale& scale) {
  std::vector<size_t> together;
  std::vector<FrozenValues> still;  // copies on the device: which rank has frozen what decides nothing on the host
  std::vector<optimizers::SliceUpdate> updates;
  for (size_t b = 0; b < state_.buckets.size(); ++b) {
    if (state_.updates_on_host(b)) continue;
    if (state_.is_row_wise(b)) {
      on_rows(b, scale);
      continue;
    }
    const at::Tensor own = state_.own_part(b);
    if (!own.is_cuda()) {
      on_device(b, scale);
      continue;
    }
    if (FrozenValues::wanted(state_, b)) still.emplace_back(state_, b, own);
    const at::Tensor gradient = state_.gradients.reducer->gradient(b);
    clip_by_value(gradient, scale);
    together.push_back(b);
    updates.push_back({.index = static_cast<int64_t>(b),
                       .gradient = gradient,
                       .copy = own.is_alias_of(state_.masters[b]) ? at::Tensor() : own});
  }
  if (together.empty()) return;
  state_.optimizer.own->update_all(updates, scale);
  consistency_.slice_updated();
  for (const FrozenValues& held : still) held.restore();
  for (const size_t b : together) state_.access->updated(b);
}

void SliceSteps::all_on_host(double gradient_scale) {
  state_.for_each_on_host([&](size_t b) { on_host(b, gradient_scale); });
}

void SliceSteps::publish(size_t b, const at::Tensor& weights) {
  const zero::ParameterBucket& bucket = state_.buckets[b];
  consistency_.slice_updated();
  bucket.kept_slice().use(/*changes=*/true,
                          [&] { at::Tensor(bucket.slice(state_.groups_of(b).shards.rank())).copy_(weights); });
  state_.access->updated(b);
}

namespace {

// Steps an optimizer of ours on this rank's slices: those whose masters and states are on the device, then those that
// the host updates while the step waits (one bucket, while the weights of the last one travel to the device and the
// next one is read from its file).
class WaitingUpdate final : public Update {
 public:
  explicit WaitingUpdate(const UpdateDeps& deps) : state_(deps.state), steps_(deps) {}

  void apply(double gradient_scale) override {
    apply_on_device({.factor = gradient_scale, .device_factor = {}, .skip = {}});
  }

  bool takes_device_scale() const override {
    if (!state_.optimizer.own || !state_.optimizer.own->takes_device_scale()) return false;
    for (size_t b = 0; b < state_.buckets.size(); ++b) {
      if (state_.updates_on_host(b) || state_.is_row_wise(b) || !state_.own_part(b).is_cuda()) return false;
    }
    return true;
  }

  void apply_on_device(const optimizers::StepScale& scale) override {
    optimizers::StepScale own = scale;
    own.factor = steps_.factor(scale.factor);
    state_.optimizer.own->begin_step();
    steps_.all_on_device(own);
    steps_.all_on_host(own.factor);
    state_.access->end_update();
    average_weights(state_, scale.skip);
  }

 private:
  ModelState& state_;
  SliceSteps steps_;
};

// Lets the program's own optimizer step on whole parameters, whose gradients are in the memory of the buckets'.
class ClientUpdate final : public Update {
 public:
  explicit ClientUpdate(const UpdateDeps& deps)
      : state_(deps.state),
        consistency_(deps.consistency),
        wants_closure_(dynamic_cast<const torch::optim::LBFGS*>(state_.optimizer.client.get()) != nullptr) {}

  void apply(double gradient_scale) override {
    require(!wants_closure_ || closure_, "step(): torch::optim::LBFGS computes the loss several times inside of its ",
            "step(), by a closure: expected engine->step(closure), where closure() returns the loss after ",
            "engine->backward(loss), found engine->step()");
    give_gradients(gradient_scale);
    consistency_.slice_updated();
    if (closure_) {
      bool first = true;
      state_.optimizer.client->step([&] {
        at::Tensor loss = closure_();
        if (!std::exchange(first, false)) give_gradients(1.0);
        return loss;
      });
    } else {
      state_.optimizer.client->step();
    }
    average_weights(state_);
  }

  void evaluate_by(std::function<at::Tensor()> closure) override { closure_ = std::move(closure); }

 private:
  void give_gradients(double gradient_scale) const {
    const double bound = state_.plan.clip_value;
    for (size_t b = 0; b < state_.buckets.size(); ++b) {
      const at::Tensor gradient = state_.gradients.reducer->gradient(b);
      if (gradient_scale != 1.0) gradient.mul_(gradient_scale);
      if (bound > 0) gradient.clamp_(-bound, bound);
      // Parameters that this rank, or its last backward, did not use get one too: all ranks update alike.
      for (const Segment& segment : state_.buckets[b].layout().segments) {
        const at::Tensor& parameter = state_.parameters[static_cast<size_t>(segment.parameter)].tensor;
        // No views for autograd: zero_grad() detaches gradients in place, which views refuse.
        parameter.mutable_grad() = state_.is_held_still(segment.parameter)
                                       ? at::Tensor()
                                       : zero::view_of(gradient, segment, parameter).variable_data();
      }
    }
  }

  ModelState& state_;
  ModelConsistency& consistency_;
  bool wants_closure_;
  std::function<at::Tensor()> closure_;
};

// Lets the host's update of a step run beside the next forward and backward (delayed_update), which still read the
// weights before it (OffloadedState::start_update); the next step publishes its weights.
class DelayedUpdate final : public Update {
 public:
  explicit DelayedUpdate(const UpdateDeps& deps) : state_(deps.state), consistency_(deps.consistency), steps_(deps) {}
  ~DelayedUpdate() override { state_.offloaded->abandon_update(); }  // it uses the optimizer
  DelayedUpdate(const DelayedUpdate&) = delete;
  DelayedUpdate& operator=(const DelayedUpdate&) = delete;

  void apply(double gradient_scale) override {
    const double factor = steps_.factor(gradient_scale);
    optimizers::SliceOptimizer& optimizer = *state_.optimizer.own;
    optimizer.begin_step();
    steps_.all_on_device({.factor = factor, .device_factor = {}, .skip = {}});
    const bool delays = optimizer.step_count() >= state_.plan.delayed_update_start;
    if (delays) {
      state_.offloaded->start_update(optimizer, factor, [this, factor](const at::Tensor& gradient) {
        steps_.clip_by_value(gradient, {.factor = factor, .device_factor = {}, .skip = {}});
      });
    } else {
      steps_.all_on_host(factor);
    }
    state_.access->end_update();
    if (!delays) average_weights(state_);  // else finish() does
  }

  void settle(Next next) override {
    if (next == Next::kStep || next == Next::kRead) finish();
  }

 private:
  // Publishes the weights that the update of the last step has made.
  void finish() {
    if (!state_.offloaded->update_runs()) return;
    const at::NoGradGuard no_grad;
    state_.access->wait_all();
    state_.offloaded->finish_update([this](size_t b, const at::Tensor& weights) { steps_.publish(b, weights); });
    at::autocast::clear_cache();  // copies of the weights before
    state_.access->end_update();
    average_weights(state_);
    consistency_.update_done();
  }

  ModelState& state_;
  ModelConsistency& consistency_;
  SliceSteps steps_;
};

}  // namespace

std::unique_ptr<Update> make_update(const UpdateDeps& deps) {
  const ModelState& state = deps.state;
  if (state.optimizer.steps_on_parameters()) return std::make_unique<ClientUpdate>(deps);
  // No bucket may be left for the host, where the share of those that are offloaded is small.
  const bool on_host = state.offloaded && state.offloaded->gradients() != nullptr;
  if (on_host && state.plan.offload.speculative) return make_speculative_update(deps);
  if (on_host && state.plan.offload.delayed) return std::make_unique<DelayedUpdate>(deps);
  return std::make_unique<WaitingUpdate>(deps);
}

}  // namespace ds::engine
