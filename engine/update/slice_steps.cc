#include "engine/update/slice_steps.h"

#include <optional>
#include <utility>
#include <vector>

#include "engine/update/held_still.h"
#include "optim/device_update.h"

namespace ds::engine {

double SliceSteps::factor(double gradient_scale) const {
  // The sum over ranks of what compressed exchanges take the mean of.
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
  bucket.use_slice(/*changes=*/true, [&] {
    const std::optional<HeldStill> still =
        HeldStill::wanted(state_, b) ? std::optional<HeldStill>(std::in_place, state_, b, own) : std::nullopt;
    if (is_master) {
      state_.optimizer.own->update(static_cast<int64_t>(b), gradient, gradient_scale);
    } else {
      update_into(gradient, own);
    }
    order_.slice_updated();
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

// Slices on a GPU, which are always loaded: one launch, and all are published after it. Elsewhere a bucket travels
// while the next one is updated.
void SliceSteps::all_on_device(const optimizers::StepScale& scale) {
  std::vector<size_t> together;
  std::vector<HeldStill> still;  // copies on the device: which rank has frozen what decides nothing on the host
  std::vector<optimizers::SliceUpdate> updates;
  for (size_t b = 0; b < state_.buckets.size(); ++b) {
    if (state_.updates_on_host(b)) continue;
    const at::Tensor own = state_.own_part(b);
    if (!own.is_cuda()) {
      on_device(b, scale);
      continue;
    }
    if (HeldStill::wanted(state_, b)) still.emplace_back(state_, b, own);
    const at::Tensor gradient = state_.gradients.reducer->gradient(b);
    clip_by_value(gradient, scale);
    together.push_back(b);
    updates.push_back({.index = static_cast<int64_t>(b),
                       .gradient = gradient,
                       .copy = own.is_alias_of(state_.masters[b]) ? at::Tensor() : own});
  }
  if (together.empty()) return;
  state_.optimizer.own->update_all(updates, scale);
  order_.slice_updated();
  for (const HeldStill& held : still) held.restore();
  for (const size_t b : together) state_.access->updated(b);
}

void SliceSteps::all_on_host(double gradient_scale) {
  state_.offloaded->for_each([&](size_t b) { on_host(b, gradient_scale); });
}

void SliceSteps::publish(size_t b, const at::Tensor& weights) {
  const zero::ParameterBucket& bucket = state_.buckets[b];
  order_.slice_updated();
  bucket.use_slice(/*changes=*/true,
                   [&] { at::Tensor(bucket.slice(state_.groups_of(b).shards.rank())).copy_(weights); });
  state_.access->updated(b);
}

}  // namespace ds::engine
