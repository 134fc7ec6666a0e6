#include "optim/muon.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/check.h"
#include "optim/chunked_update.h"
#include "optim/device_update.h"

namespace ds::optimizers {
namespace {

at::Tensor join(const at::Tensor& bucket, const BucketParameter& parameter) {
  std::vector<at::Tensor> runs;
  for (const Segment& run : parameter.runs) runs.push_back(bucket.narrow(0, run.slice_offset, run.length));
  return runs.size() == 1 ? runs[0] : at::cat(runs);
}

// Returns a matrix in the shape in which it is made orthogonal. `flat` may have several parameters of these sizes, in
// its first dimension.
at::Tensor matrix_of(const at::Tensor& flat, at::IntArrayRef sizes) {
  std::vector<int64_t> shape(flat.sizes().begin(), flat.sizes().end() - 1);
  if (sizes.size() == 4) {
    shape.insert(shape.end(), {sizes[0], -1});
  } else {
    shape.insert(shape.end(), sizes.begin(), sizes.end());
  }
  return flat.view(shape);
}

// The whole parameter's step from its whole momentum: flat, as `flat` is.
at::Tensor matrix_step(const at::Tensor& flat, at::IntArrayRef sizes, NewtonSchulzMethod method) {
  const auto rows = static_cast<double>(sizes[sizes.size() - 2]);
  const auto cols = static_cast<double>(sizes[sizes.size() - 1]);
  at::Tensor step = orthogonalize(matrix_of(flat, sizes), method);
  if (rows > cols) step = step.mul(std::sqrt(rows / cols));
  return step.reshape(flat.sizes());
}

// Elements that are made orthogonal together: enough to fill a device, and the temporaries stay small.
constexpr int64_t kTogether = int64_t{1} << 25;

// A whole matrix whose step is wanted.
struct WantedStep {
  int64_t parameter = 0;
  at::Tensor flat;
  std::vector<int64_t> sizes;
  std::vector<int64_t> blocks;  // the same, as it is made orthogonal
};

// [n] steps of all, by the place in `wanted`. Those of one shape are made together.
std::vector<at::Tensor> steps_by_shape(const std::vector<WantedStep>& wanted, NewtonSchulzMethod method) {
  std::map<std::vector<int64_t>, std::vector<size_t>> of_shape;
  for (size_t i = 0; i < wanted.size(); ++i) of_shape[wanted[i].blocks].push_back(i);
  std::vector<at::Tensor> steps(wanted.size());
  for (const auto& [blocks, places] : of_shape) {
    const int64_t numel = wanted[places.front()].flat.numel();
    const auto most = static_cast<size_t>(std::max<int64_t>(1, kTogether / std::max<int64_t>(1, numel)));
    for (size_t begin = 0; begin < places.size(); begin += most) {
      const size_t end = std::min(places.size(), begin + most);
      std::vector<at::Tensor> together;
      for (size_t i = begin; i < end; ++i) together.push_back(wanted[places[i]].flat);
      const at::Tensor made = matrix_step(at::stack(together), blocks, method);
      for (size_t i = begin; i < end; ++i) steps[places[i]] = made[static_cast<int64_t>(i - begin)];
    }
  }
  return steps;
}

}  // namespace

bool uses_muon(const ParameterInfo& parameter) {
  const auto is_table = [](const std::string& name) {
    return name.find("embed") != std::string::npos || name.find("lm_head") != std::string::npos;
  };
  return parameter.sizes.size() >= 2 && !is_table(parameter.name) &&
         std::none_of(parameter.other_names.begin(), parameter.other_names.end(), is_table);
}

Muon::Muon(std::vector<GroupOptions> groups, NewtonSchulzMethod method, AdamRule aux, std::vector<int64_t> block_rows)
    : CopyingOptimizer(std::move(groups)), method_(method), aux_(aux), block_rows_(std::move(block_rows)) {}

std::vector<int64_t> Muon::in_blocks(int64_t parameter, const std::vector<int64_t>& sizes) const {
  const int64_t rows = block_rows_.empty() ? 0 : block_rows_.at(static_cast<size_t>(parameter));
  if (rows == 0) return sizes;
  require(sizes.size() == 2 && sizes[0] % rows == 0, "Muon: parameter ", parameter, ": expected a matrix of blocks of ",
          rows, " rows, found sizes ", at::IntArrayRef(sizes));
  return {sizes[0] / rows, rows, sizes[1]};
}

void Muon::allocate_states(int64_t index, const NewState& new_state) {
  const Slice& own = slice(index);
  State state;
  const std::vector<BucketParameter> whole = bucket_parameters(own, "Muon");
  const auto info = [&](const BucketParameter& p) -> const ParameterInfo& {
    return (*own.parameters)[static_cast<size_t>(p.parameter)];
  };
  const bool by_muon = !whole.empty() && uses_muon(info(whole[0]));
  for (const BucketParameter& parameter : whole) {
    require(uses_muon(info(parameter)) == by_muon, "Muon: expected matrices and other parameters in different groups, ",
            "found ", info(whole[0]).name, " and ", info(parameter).name, " in group ", own.group);
  }
  if (by_muon) {
    state.momentum = new_state();
    state.matrices = whole;
  } else {
    state.adam = allocate_adam_states(new_state, aux_);
  }
  states_.push_back(std::move(state));
}

void Muon::update_into(int64_t index, const at::Tensor& gradient, double gradient_scale, const at::Tensor& copy) {
  const at::NoGradGuard no_grad;
  const Slice& slice = slice_for_update(index, gradient);
  const GroupOptions& group = step_group(slice);
  State& state = states_[static_cast<size_t>(index)];
  if (state.momentum.defined()) {
    update_matrices(slice, group, state, gradient, gradient_scale);
    if (copy.defined()) copy.copy_(slice.master);
  } else {
    update_adam_slice(slice.master, gradient, {step_count_, gradient_scale, group, aux_}, state.adam, copy);
  }
}

at::Tensor Muon::blend_momentum(const GroupOptions& group, const State& state, const at::Tensor& gradient,
                                double gradient_scale) const {
  const at::ScalarType type = state_type(state.momentum.scalar_type());
  const at::Tensor result = gradient.to(type);
  if (gradient_scale != 1.0) result.mul_(gradient_scale);
  const at::Tensor momentum = state.momentum.to(type);  // itself, unless it is kept in 16 bits
  momentum.lerp_(result, 1 - group.momentum);
  if (!momentum.is_same(state.momentum)) state.momentum.copy_(momentum);
  return result.lerp_(momentum, group.momentum);
}

// For a part of a matrix, this is its piece of the step of the full matrix.
at::Tensor Muon::own_step(const Slice& slice, const BucketParameter& matrix, const at::Tensor& flat) const {
  const std::vector<int64_t>& sizes = (*slice.parameters)[static_cast<size_t>(matrix.parameter)].sizes;
  if (!slice.parts) return matrix_step(flat, in_blocks(matrix.parameter, sizes), method_);
  const at::Tensor whole = slice.parts->whole(matrix.parameter, flat.view(sizes));
  const std::vector<int64_t> blocks = in_blocks(matrix.parameter, whole.sizes().vec());
  const at::Tensor step = matrix_step(whole.reshape({-1}), blocks, method_);
  return slice.parts->part(matrix.parameter, step.view(whole.sizes())).reshape({-1});
}

void Muon::update_matrices(const Slice& slice, const GroupOptions& group, const State& state,
                           const at::Tensor& gradient, double gradient_scale) const {
  const at::Tensor own = blend_momentum(group, state, gradient, gradient_scale);
  const at::Tensor bucket = slice.exchange->size() > 1 ? slice.exchange->all_gather(own) : own;
  for (const BucketParameter& matrix : state.matrices) {
    at::Tensor step;  // made when the first segment of this slice needs it
    for (const Segment& segment : slice.segments) {
      if (segment.parameter != matrix.parameter || segment.length == 0) continue;
      if (!step.defined()) step = own_step(slice, matrix, join(bucket, matrix));
      for_each_chunk(slice.master.narrow(0, segment.slice_offset, segment.length),
                     step.narrow(0, segment.parameter_offset, segment.length), KernelMemory::kFused,
                     [&](int64_t /*begin*/, const at::Tensor& m, const at::Tensor& s) {
                       if (group.weight_decay != 0.0) m.mul_(1 - group.lr * group.weight_decay);
                       m.add_(s, -group.lr);
                     });
    }
  }
}

std::map<int64_t, at::Tensor> Muon::own_steps(const Slice& slice, const State& state, const at::Tensor& bucket) const {
  const auto has_elements = [&](int64_t parameter) {
    return std::any_of(slice.segments.begin(), slice.segments.end(),
                       [&](const Segment& segment) { return segment.parameter == parameter && segment.length > 0; });
  };
  std::map<int64_t, at::Tensor> steps;
  std::vector<WantedStep> wanted;
  const auto make = [&] {
    const std::vector<at::Tensor> made = steps_by_shape(wanted, method_);
    for (size_t i = 0; i < wanted.size(); ++i) {
      at::Tensor& step = steps[wanted[i].parameter];
      step = made[i];
      // A copy: the whole step goes.
      if (slice.parts) step = slice.parts->part(wanted[i].parameter, step.view(wanted[i].sizes)).clone();
      step = step.reshape({-1});
    }
    wanted.clear();
  };
  int64_t elements = 0;  // of whole matrices that ranks of an axis have gathered: more than the bucket has
  for (const BucketParameter& matrix : state.matrices) {
    if (!has_elements(matrix.parameter)) continue;
    const std::vector<int64_t>& sizes = (*slice.parameters)[static_cast<size_t>(matrix.parameter)].sizes;
    const at::Tensor flat = join(bucket, matrix);
    if (!slice.parts) {
      wanted.push_back({matrix.parameter, flat, sizes, in_blocks(matrix.parameter, sizes)});
      continue;
    }
    const at::Tensor whole = slice.parts->whole(matrix.parameter, flat.view(sizes));
    if (elements + whole.numel() > kTogether && !wanted.empty()) {
      make();
      elements = 0;
    }
    const std::vector<int64_t> whole_sizes = whole.sizes().vec();
    wanted.push_back({matrix.parameter, whole.reshape({-1}), whole_sizes, in_blocks(matrix.parameter, whole_sizes)});
    elements += whole.numel();
  }
  make();
  return steps;
}

void Muon::update_matrices_together(const Slice& slice, const GroupOptions& group, const SliceUpdate& update,
                                    const StepScale& scale) const {
  const State& state = states_[static_cast<size_t>(update.index)];
  const at::Tensor own = at::empty_like(state.momentum);  // where the step is skipped nobody uses it
  DeviceBatch blend;
  blend.add({own, {state.momentum}, update.gradient, scale.factor, at::Tensor()});
  const MuonBlendCoefficients blends{.momentum = static_cast<float>(group.momentum),
                                     .gradient_share = static_cast<float>(1 - group.momentum)};
  blend.run(scale, [&](const DeviceSlice* slices, int64_t count, const UpdateScale& factor, void* stream) {
    return device_functions<UpdateDeviceKernels>()->muon_blend(slices, &blends, count, factor, stream);
  });
  const at::Tensor bucket = slice.exchange->size() > 1 ? slice.exchange->all_gather(own) : own;
  const std::map<int64_t, at::Tensor> steps = own_steps(slice, state, bucket);
  DeviceBatch apply;
  std::vector<MuonStepCoefficients> coefficients;
  for (const Segment& segment : slice.segments) {
    if (segment.length == 0) continue;
    const auto part = [&](const at::Tensor& flat) {
      return flat.defined() ? flat.narrow(0, segment.slice_offset, segment.length) : flat;
    };
    apply.add({part(slice.master),
               {},
               steps.at(segment.parameter).narrow(0, segment.parameter_offset, segment.length),
               1.0,
               part(update.copy)});
    coefficients.push_back(
        {.lr = static_cast<float>(group.lr), .master_decay = static_cast<float>(1 - group.lr * group.weight_decay)});
  }
  if (apply.empty()) return;
  apply.run({.factor = 1.0, .device_factor = {}, .skip = scale.skip}, [&](const DeviceSlice* slices, int64_t count,
                                                                          const UpdateScale& factor, void* stream) {
    return device_functions<UpdateDeviceKernels>()->muon_step(slices, coefficients.data(), count, factor, stream);
  });
}

void Muon::update_all(const std::vector<SliceUpdate>& updates, const StepScale& scale) {
  const at::NoGradGuard no_grad;
  std::vector<SliceUpdate> others;
  for (const SliceUpdate& update : updates) {
    const Slice& slice = slice_for_update(update.index, update.gradient);
    const State& state = states_[static_cast<size_t>(update.index)];
    if (!state.momentum.defined()) {
      others.push_back(update);
    } else if (wide_kernels_take({slice.master, {state.momentum}, update.gradient, scale.factor, update.copy})) {
      update_matrices_together(slice, step_group(slice), update, scale);
    } else {
      SliceOptimizer::update_all({update}, scale);
    }
  }
  update_together(
      others, scale, &UpdateDeviceKernels::adam,
      [&](const SliceUpdate& update) {
        const Slice& slice = slice_for_update(update.index, update.gradient);
        return describe_adam_slice(slice.master, update, {step_count_, scale.factor, step_group(slice), aux_},
                                   states_[static_cast<size_t>(update.index)].adam);
      },
      [&](const SliceUpdate& update) { update_into(update.index, update.gradient, scale.factor, update.copy); });
}

NamedStates Muon::states(int64_t index) {
  const State& state = states_.at(static_cast<size_t>(index));
  return state.momentum.defined() ? NamedStates{{"momentum_buffer", state.momentum}} : named_adam_states(state.adam);
}

}  // namespace ds::optimizers
