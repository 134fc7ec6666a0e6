#include "optim/muon.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

#include <cmath>
#include <utility>

#include "core/check.h"
#include "optim/slice_update.h"

namespace ds::optimizers {
namespace {

at::Tensor join(const at::Tensor& bucket, const BucketParameter& parameter) {
  std::vector<at::Tensor> runs;
  for (const Segment& run : parameter.runs) runs.push_back(bucket.narrow(0, run.slice_offset, run.length));
  return runs.size() == 1 ? runs[0] : at::cat(runs);
}

// The whole parameter's step from its whole momentum: flat.
at::Tensor matrix_step(const at::Tensor& flat, const std::vector<int64_t>& sizes, NewtonSchulzMethod method) {
  const at::Tensor matrix = sizes.size() == 4 ? flat.view({sizes[0], -1}) : flat.view(sizes);
  const auto rows = static_cast<double>(sizes[sizes.size() - 2]);
  const auto cols = static_cast<double>(sizes[sizes.size() - 1]);
  at::Tensor step = orthogonalize(matrix, method);
  if (rows > cols) step = step.mul(std::sqrt(rows / cols));
  return step.reshape({-1});
}

}  // namespace

bool uses_muon(const ParameterInfo& parameter) {
  return parameter.sizes.size() >= 2 && parameter.name.find("embed") == std::string::npos &&
         parameter.name.find("lm_head") == std::string::npos;
}

Muon::Muon(std::vector<GroupOptions> groups, NewtonSchulzMethod method, AdamRule aux)
    : ShardOptimizer(std::move(groups)), method_(method), aux_(aux) {}

void Muon::allocate_states(int64_t index) {
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
    state.momentum = new_state(index);
    state.matrices = whole;
  } else {
    state.adam = allocate_adam_states([&] { return new_state(index); }, aux_);
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
  const at::Tensor result = gradient.to(state.momentum.scalar_type());
  if (gradient_scale != 1.0) result.mul_(gradient_scale);
  state.momentum.lerp_(result, 1 - group.momentum);
  return result.lerp_(state.momentum, group.momentum);
}

// Of a part it is that of the whole matrix.
at::Tensor Muon::own_step(const Slice& slice, const BucketParameter& matrix, const at::Tensor& flat) const {
  const std::vector<int64_t>& sizes = (*slice.parameters)[static_cast<size_t>(matrix.parameter)].sizes;
  if (!slice.parts) return matrix_step(flat, sizes, method_);
  const at::Tensor whole = slice.parts->whole(matrix.parameter, flat.view(sizes));
  const at::Tensor step = matrix_step(whole.reshape({-1}), whole.sizes().vec(), method_);
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

NamedStates Muon::states(int64_t index) {
  const State& state = states_.at(static_cast<size_t>(index));
  return state.momentum.defined() ? NamedStates{{"momentum_buffer", state.momentum}} : named_adam_states(state.adam);
}

}  // namespace ds::optimizers
