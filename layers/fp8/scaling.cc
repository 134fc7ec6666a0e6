#include "layers/fp8/scaling.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "layers/fp8/quantize_measured.h"

namespace ds::fp8 {
namespace {

// Steps for which scales are kept for what is computed again; a backward pass follows its forward within one or two.
constexpr size_t kGenerationsKept = 16;

// Returns the amax of the full tensor, float32 [], of which `values` is this rank's part. Collective over `axis`.
at::Tensor shared_amax(const at::Tensor& values, comm::Communicator& axis) {
  const at::NoGradGuard no_grad;
  const at::Tensor amax = amax_of(values).clone().view({1});
  axis.all_reduce(amax, comm::ReduceOp::kMax, "amax of a part in fp8").wait();
  return amax.select(0, 0);
}

}  // namespace

Scaling::Scaling(const ScalingOptions& options, std::vector<std::string> layers, c10::Device device)
    : options_(options), layers_(std::move(layers)) {
  used_.resize(layers_.size());
  told_.resize(layers_.size());
  ensure(!options_.blocks || options_.recipe == Recipe::kCurrent, "scales of blocks are those of the tensor at hand");
  if (layers_.empty()) return;
  const auto count = static_cast<int64_t>(layers_.size());
  const auto floats = at::TensorOptions().dtype(at::kFloat).device(device);
  amax_ = at::zeros({count, kKinds}, floats);
  scales_.push_back(at::zeros({count, kKinds}, floats));
  if (options_.recipe == Recipe::kDelayed) history_ = at::zeros({options_.history, count, kKinds}, floats);
}

int64_t Scaling::generation() const {
  const std::lock_guard lock(mutex_);
  return first_generation_ + static_cast<int64_t>(scales_.size()) - 1;
}

at::Tensor Scaling::scales(int64_t generation) const {
  const std::lock_guard lock(mutex_);
  const int64_t last = first_generation_ + static_cast<int64_t>(scales_.size()) - 1;
  require(generation >= first_generation_ && generation <= last,
          "fp8: expected a region that is computed again within ", kGenerationsKept,
          " optimizer steps of its first run, found one of step ", generation, ", and the scales of ",
          first_generation_, " to ", last, " only; call backward() sooner");
  return scales_[static_cast<size_t>(generation - first_generation_)];
}

void Scaling::share_parts(std::shared_ptr<comm::Communicator> axis, std::vector<char> layers) {
  ensure(layers.size() == layers_.size(), "a flag for each layer");
  if (options_.recipe == Recipe::kCurrent) return;
  axis_ = std::move(axis);
  parts_ = std::move(layers);
  weight_scales_.resize(parts_.size());
}

// A scale that fits one part and not another would be another product than that of one rank, so all ranks of the axis
// choose by the full weight: when it is first read after the scales have changed, as it then may have changed, too.
at::Tensor Scaling::weight_scale(const at::Tensor& values, int64_t layer, const at::Tensor& scales) {
  const auto place = static_cast<size_t>(layer);
  {
    const std::lock_guard lock(mutex_);
    const WeightScale& known = weight_scales_[place];
    if (known.chosen_for.is_same(scales)) return known.scale;
  }
  const ScaleChoice choice{.stored = scales.select(0, layer).select(0, static_cast<int64_t>(Kind::kWeight)),
                           .covers = true,
                           .margin = options_.margin};
  const at::Tensor scale = chosen_scale(choice, shared_amax(values, *axis_), format_of(Kind::kWeight));
  const std::lock_guard lock(mutex_);
  weight_scales_[place] = {.chosen_for = scales, .scale = scale};
  return scale;
}

Quantized Scaling::quantized(const at::Tensor& values, int64_t layer, Kind kind, const at::Tensor& scales,
                             bool records) {
  const bool delayed = options_.recipe == Recipe::kDelayed;
  const bool in_parts = delayed && axis_ && parts_[static_cast<size_t>(layer)] != 0;
  const auto column = static_cast<int64_t>(kind);
  at::Tensor record;
  bool has_history = false;
  if (delayed) {
    const std::lock_guard lock(mutex_);
    if (records) record = amax_.select(0, layer).select(0, column);
    has_history = has_history_;
  }
  at::Tensor stored;
  if (in_parts && kind == Kind::kWeight) {
    stored = weight_scale(values, layer, scales);
  } else if (in_parts && !has_history) {  // by the tensor at hand, over all of its parts
    stored = scale_for(shared_amax(values, *axis_), format_of(kind), options_.margin);
  } else if (delayed) {
    stored = scales.select(0, layer).select(0, column);
  }
  return quantize_measured(
             values, format_of(kind),
             {.stored = stored, .covers = kind == Kind::kWeight, .margin = options_.margin, .record = record})
      .matrix;
}

// As scale_for(); a tensor that has had no elements but zeros keeps the scale that it had, or none.
at::Tensor Scaling::scales_from(const at::Tensor& amax, const at::Tensor& before) const {
  std::vector<at::Tensor> columns;
  for (int64_t kind = 0; kind < kKinds; ++kind) {
    const at::Tensor of_kind = amax.select(1, kind);
    const at::Tensor scale = scale_for(of_kind, format_of(static_cast<Kind>(kind)), options_.margin);
    columns.push_back(at::where(of_kind.gt(0), scale, before.select(1, kind)).unsqueeze(1));
  }
  return at::cat(columns, 1);
}

void Scaling::note_use(int64_t layer) {
  const std::lock_guard lock(mutex_);
  used_[static_cast<size_t>(layer)] = 1;
}

// A program that multiplies with the weight by itself, or leaves the layer out, gets what it would without FP8.
void Scaling::tell_of_unused(int rank) {
  const std::lock_guard lock(mutex_);
  const bool is_first = !std::exchange(first_step_is_over_, true);
  std::string names;
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (std::exchange(used_[i], 0) != 0 || std::exchange(told_[i], 1) != 0) continue;
    names += cat(names.empty() ? "" : ", ", layers_[i]);
  }
  if (rank != 0 || names.empty()) return;
  log::warning("fp8: expected all of its layers to be computed as Linear layers, found none of it in ",
               is_first ? "the first step" : "a step, as before it,", " for ", names,
               ", on the first rank that has them: what the program ",
               "computes with their weights is not on FP8; leave them out (fp8.exclude) if that is meant (said once)");
}

void Scaling::end_step(comm::Communicator& ranks, const at::Tensor& skip) {
  if (layers_.empty()) return;
  tell_of_unused(ranks.rank());
  if (options_.recipe == Recipe::kCurrent) return;
  const at::NoGradGuard no_grad;
  at::Tensor amax;
  {
    const std::lock_guard lock(mutex_);
    amax = std::exchange(amax_, at::zeros_like(amax_));
  }
  if (ranks.size() > 1) ranks.all_reduce(amax, comm::ReduceOp::kMax, "amax of fp8").wait();
  const std::lock_guard lock(mutex_);
  const at::Tensor entry = history_.select(0, next_);
  const at::Tensor& before = scales_.back();
  const at::Tensor skipped = skip.defined() ? skip.gt(0) : at::Tensor();
  entry.copy_(skip.defined() ? at::where(skipped, entry, amax) : amax);
  next_ = (next_ + 1) % options_.history;
  has_history_ = true;
  const at::Tensor scales = scales_from(options_.most_recent ? amax : history_.amax(0), before);
  scales_.push_back(skip.defined() ? at::where(skipped, before, scales) : scales);
  if (scales_.size() <= kGenerationsKept) return;
  scales_.pop_front();
  ++first_generation_;
}

// The entry that is written next holds what it did, and the scales in force are those that were.
void Scaling::take_back_step() {
  if (layers_.empty() || options_.recipe == Recipe::kCurrent) return;
  const std::lock_guard lock(mutex_);
  next_ = (next_ + options_.history - 1) % options_.history;
}

void Scaling::drop_step() {
  if (layers_.empty()) return;
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(mutex_);
  amax_.zero_();
}

void Scaling::gradients_scaled(const at::Tensor& factor) {
  if (layers_.empty() || options_.recipe == Recipe::kCurrent) return;
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(mutex_);
  constexpr auto kColumn = static_cast<int64_t>(Kind::kGradient);
  history_.select(2, kColumn).mul_(factor);
  // Graphs may have the scales that were.
  scales_.back() = scales_.back().clone();
  scales_.back().select(1, kColumn).div_(factor).clamp_max_(std::numeric_limits<float>::max());
}

void Scaling::gradients_scaled(double factor) {
  if (!layers_.empty() && factor != 1.0) gradients_scaled(at::full({}, factor, amax_.options()));
}

at::Tensor Scaling::memory(int64_t layer) const {
  const std::lock_guard lock(mutex_);
  const at::Tensor scale = scales_.back().select(0, layer).unsqueeze(1);
  if (!history_.defined()) return scale.clone();
  return at::cat({history_.select(1, layer).roll(-next_, 0).t(), scale}, 1).contiguous();
}

void Scaling::take(int64_t layer, const at::Tensor& memory) {
  if (options_.recipe == Recipe::kCurrent) return;
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(mutex_);
  const int64_t steps = std::min(memory.size(1) - 1, options_.history);
  // In order, the newest one last: what is written next is the oldest.
  history_.copy_(history_.roll(-next_, 0));
  next_ = 0;
  const at::Tensor of_layer = history_.select(1, layer);
  of_layer.zero_();
  of_layer.narrow(0, options_.history - steps, steps).copy_(memory.narrow(1, memory.size(1) - 1 - steps, steps).t());
  // Graphs may have the scales that were.
  scales_.back() = scales_.back().clone();
  scales_.back().select(0, layer).copy_(memory.select(1, memory.size(1) - 1));
  amax_.select(0, layer).zero_();
  has_history_ = true;
}

void Scaling::forget() {
  if (layers_.empty()) return;
  const std::lock_guard lock(mutex_);
  amax_.zero_();
  scales_.back() = at::zeros_like(scales_.back());
  has_history_ = false;
  if (history_.defined()) history_.zero_();
}

std::shared_ptr<Scaling> scaling_without_layers() {
  return std::make_shared<Scaling>(ScalingOptions{.recipe = Recipe::kCurrent}, std::vector<std::string>(), c10::kCPU);
}

}  // namespace ds::fp8
