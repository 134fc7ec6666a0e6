#include "optim/lamb.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "optim/cpu_update.h"
#include "optim/device_update.h"

namespace ds::optimizers {
namespace {

LambCoefficients coefficients_of(const LambRule& rule, const GroupOptions& group, int64_t step) {
  LambCoefficients c;
  c.beta1 = static_cast<float>(group.beta1);
  c.gradient_share = static_cast<float>(1 - group.beta1);
  c.beta2 = static_cast<float>(group.beta2);
  c.square_share = static_cast<float>(1 - group.beta2);
  c.eps = static_cast<float>(group.eps);
  c.weight_decay = static_cast<float>(group.weight_decay);
  c.eps_inside_sqrt = rule.eps_inside_sqrt;
  c.step_size = lamb_step_size(rule, group, step, step);
  c.min_coeff = rule.min_coeff;
  c.max_coeff = rule.max_coeff;
  return c;
}

DeviceSlice part_of(const SliceArrays& whole, const Segment& segment) {
  const int64_t begin = segment.slice_offset;
  SliceArrays part = whole;
  part.master = whole.wide_master() + begin;
  for (int s : {0, 1}) part.states[s] = whole.wide_state(s) + begin;
  part.gradient = static_cast<const char*>(whole.gradient) + begin * bytes_of(whole.gradient_type);
  if (whole.copy != nullptr) part.copy = static_cast<char*>(whole.copy) + begin * bytes_of(whole.copy_type);
  return {.arrays = part, .numel = segment.length};
}

// Slices of a device between their first pass and the second.
class LambPasses {
 public:
  void add(const Slice& slice, const LambState& state, const SliceTensors& tensors,
           const LambCoefficients& coefficients) {
    const SliceArrays arrays = arrays_of(tensors);
    for (size_t i = 0; i < slice.segments.size(); ++i) {
      runs_.push_back({.part = part_of(arrays, slice.segments[i]),
                       .coefficients = coefficients,
                       .parameter = parameters_ + state.position[i]});
      tiles_ += lamb_tiles(slice.segments[i].length);
    }
    const auto own = static_cast<int64_t>(state.parameters.size());
    sums_.push_back({.slice = &slice, .first = parameters_, .count = own});
    parameters_ += own;
  }

  // Collective over each slice's exchange, also where this rank has no element of its parameters.
  void run(const StepScale& scale) const {
    if (sums_.empty()) return;
    const at::Device device = sums_.front().slice->master.device();
    const auto options = at::TensorOptions().dtype(at::kDouble).device(device);
    const at::Tensor parameters = at::zeros({parameters_, 2}, options);
    const at::Tensor tiles = at::empty({tiles_, 2}, options);
    const LambSums sums{.tiles = tiles.mutable_data_ptr<double>(), .parameters = parameters.mutable_data_ptr<double>()};
    const auto count = static_cast<int64_t>(runs_.size());
    const LambDeviceKernels& kernels = device_functions<UpdateDeviceKernels>()->lamb;
    give_to_device(device, scale, [&](const UpdateScale& factor, void* stream) {
      return kernels.advance(runs_.data(), count, factor, sums, stream);
    });
    for (const Sums& own : sums_) own.slice->exchange->sum(parameters.narrow(0, own.first, own.count));
    give_to_device(device, scale, [&](const UpdateScale& factor, void* stream) {
      return kernels.apply(runs_.data(), count, factor, sums, stream);
    });
  }

 private:
  // Where a slice's bucket has the sums of its parameters.
  struct Sums {
    const Slice* slice;
    int64_t first;
    int64_t count;
  };

  std::vector<LambRun> runs_;
  std::vector<Sums> sums_;
  int64_t parameters_ = 0;
  int64_t tiles_ = 0;
};

}  // namespace

Lamb::Lamb(std::vector<GroupOptions> groups, LambRule rule) : SliceOptimizer(std::move(groups)), rule_(rule) {
  require_lamb_rule(rule);
}

void Lamb::allocate_states(int64_t index, const NewState& new_state) {
  const at::Tensor exp_avg = new_state();
  states_.push_back(make_lamb_state(slice(index), exp_avg, new_state(), "Lamb"));
}

void Lamb::update(int64_t index, const at::Tensor& gradient, double gradient_scale) {
  const at::NoGradGuard no_grad;
  const Slice& slice = slice_for_update(index, gradient);
  const GroupOptions& group = step_group(slice);
  const LambState& state = states_[static_cast<size_t>(index)];
  const at::Tensor squares = advance_lamb(slice, state, rule_, group, gradient, gradient_scale);
  apply_lamb(slice, state, rule_, group, lamb_coefficients(rule_, squares),
             lamb_step_size(rule_, group, step_count_, step_count_));
}

void Lamb::update_all(const std::vector<SliceUpdate>& updates, const StepScale& scale) {
  const at::NoGradGuard no_grad;
  LambPasses passes;
  for (const SliceUpdate& update : updates) {
    const Slice& slice = slice_for_update(update.index, update.gradient);
    const LambState& state = states_[static_cast<size_t>(update.index)];
    const SliceTensors tensors{
        slice.master, {state.exp_avg, state.exp_avg_sq}, update.gradient, scale.factor, update.copy};
    if (wide_kernels_take(tensors)) {
      const GroupOptions& group = step_group(slice);
      passes.add(slice, state, tensors, coefficients_of(rule_, group, step_count_));
    } else {
      SliceOptimizer::update_all({update}, scale);
    }
  }
  passes.run(scale);
}

NamedStates Lamb::states(int64_t index) {
  const LambState& state = states_.at(static_cast<size_t>(index));
  return {{"exp_avg", state.exp_avg}, {"exp_avg_sq", state.exp_avg_sq}};
}

}  // namespace ds::optimizers
