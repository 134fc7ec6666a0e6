#include "engine/state/whole_state.h"

#include <ATen/ops/empty.h>

#include <unordered_map>

#include "core/check.h"
#include "engine/state/tensor_parts.h"
#include "optim/slice_update.h"

namespace ds::engine {
namespace {

at::Tensor copy_on_host(const at::Tensor& tensor) { return tensor.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true); }

}  // namespace

void for_each_whole_bucket(const ModelState& state, size_t first,
                           const std::function<void(const zero::ParameterBucket&)>& use) {
  const size_t trained = state.buckets.size();
  for (size_t b = first; b < trained + state.frozen_buckets.size(); ++b) {
    state.gatherer->gather(b);
    try {
      use(b < trained ? state.buckets[b] : state.frozen_buckets[b - trained]);
    } catch (...) {
      state.gatherer->drop(b);
      throw;
    }
    state.gatherer->drop(b);
  }
}

at::Tensor whole_master(const ModelState& state, size_t bucket) {
  const zero::ParameterBucket& parameters_of = state.buckets[bucket];
  if (!state.plan.separate_master && !parameters_of.sharded()) return parameters_of.flat();
  at::Tensor flat;
  state.use_master(bucket, /*changes=*/false, [&](const at::Tensor& master) {
    comm::Communicator& shards = state.groups_of(bucket).shards;
    const bool joins = state.plan.partition_optimizer && shards.size() > 1;
    const at::Tensor own = master.to(state.ranks.device);
    flat = joins ? at::empty({parameters_of.layout().numel}, own.options()) : own.clone();
    if (joins) shards.all_gather(flat, own, cat("master weights of bucket ", bucket)).wait();
  });
  return flat;
}

at::Tensor joined_over_axis(const ModelState& state, const zero::Parameter& parameter, const at::Tensor& values) {
  if (!parameter.part) return values;
  return state.tensor->joined(values.to(state.ranks.device), *parameter.part).to(values.device());
}

std::vector<std::pair<std::string, at::Tensor>> whole_module(const ModelState& state) {
  std::unordered_map<const void*, at::Tensor> found;  // by identity of what is trained
  if (state.gatherer) {
    for_each_whole_bucket(state, 0, [&](const zero::ParameterBucket& bucket) {
      for (const zero::Parameter& parameter : bucket.parameters()) {
        found[parameter.tensor.unsafeGetTensorImpl()] = copy_on_host(parameter.tensor.detach());
      }
    });
  }
  // In module order, which is the same on all ranks of a tensor axis; their buckets may be others.
  for (const auto* list : {&state.parameters, &state.frozen}) {
    for (const zero::Parameter& parameter : *list) {
      at::Tensor& values = found[parameter.tensor.unsafeGetTensorImpl()];
      if (!values.defined()) values = copy_on_host(parameter.tensor.detach());
      values = joined_over_axis(state, parameter, values);
    }
  }
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (const auto& item : state.module->named_parameters()) {
    const auto own = found.find(trained_tensor(item.value()).unsafeGetTensorImpl());
    result.emplace_back(item.key(), own == found.end() ? copy_on_host(item.value().detach()) : own->second);
  }
  for (const auto& item : state.module->named_buffers()) {
    result.emplace_back(item.key(), copy_on_host(item.value()));
  }
  return result;
}

std::vector<std::pair<std::string, at::Tensor>> whole_masters(const ModelState& state) {
  std::vector<at::Tensor> own(state.parameters.size());
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    const zero::BucketLayout& layout = state.buckets[b].layout();
    const at::Tensor flat = whole_master(state, b);
    for (const Segment& segment : layout.segments) {
      const auto index = static_cast<size_t>(segment.parameter);
      own[index] = copy_on_host(zero::view_of(flat, segment, state.parameters[index].tensor));
    }
  }
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (size_t i = 0; i < own.size(); ++i) {
    result.emplace_back(state.parameters[i].name, joined_over_axis(state, state.parameters[i], own[i]));
  }
  std::unordered_map<const void*, at::Tensor> gathered;
  const auto cast = [](const at::Tensor& tensor) {
    return copy_on_host(tensor.detach().to(optimizers::state_type(tensor.scalar_type())));
  };
  if (state.gatherer) {
    for_each_whole_bucket(state, state.buckets.size(), [&](const zero::ParameterBucket& bucket) {
      for (const zero::Parameter& one : bucket.parameters()) {
        gathered[one.tensor.unsafeGetTensorImpl()] = cast(one.tensor);
      }
    });
  }
  for (const zero::Parameter& frozen : state.frozen) {
    const auto found = gathered.find(frozen.tensor.unsafeGetTensorImpl());
    const at::Tensor values = found == gathered.end() ? cast(frozen.tensor) : found->second;
    result.emplace_back(frozen.name, joined_over_axis(state, frozen, values));
  }
  return result;
}

}  // namespace ds::engine
