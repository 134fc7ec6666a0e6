#include "model/state/whole_state.h"

#include <ATen/ops/empty.h>

#include <unordered_map>

#include "core/check.h"
#include "model/state/tensor_parts.h"
#include "optim/chunked_update.h"

namespace ds::engine {
namespace {

at::Tensor copy_on_host(const at::Tensor& tensor) { return tensor.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true); }

}  // namespace

void for_each_whole_bucket(const ModelState& state, size_t first,
                           const std::function<void(const zero::ParameterBucket&)>& use,
                           const std::function<bool(const zero::ParameterBucket&)>& wanted) {
  if (!state.gatherer) return;
  const size_t trained = state.buckets.size();
  for (size_t b = first; b < trained + state.frozen_buckets.size(); ++b) {
    const zero::ParameterBucket& bucket = b < trained ? state.buckets[b] : state.frozen_buckets[b - trained];
    if (wanted && !wanted(bucket)) continue;
    state.gatherer->held().gather(b);
    try {
      use(bucket);
    } catch (...) {
      state.gatherer->held().drop(b);
      throw;
    }
    state.gatherer->held().drop(b);
  }
}

at::Tensor joined_slices(const ModelState& state, size_t bucket, const at::Tensor& own, const std::string& label) {
  comm::Communicator& shards = state.groups_of(bucket).shards;
  const at::Tensor here = own.to(state.ranks.device);
  if (!state.plan.partition_optimizer || shards.size() == 1) return here.clone();
  at::Tensor whole = at::empty({here.numel() * shards.size()}, here.options());
  shards.all_gather(whole, here, label).wait();
  return whole;
}

at::Tensor whole_master(const ModelState& state, size_t bucket) {
  const zero::ParameterBucket& parameters_of = state.buckets[bucket];
  if (!state.plan.separate_master && !parameters_of.sharded()) return parameters_of.flat();
  at::Tensor flat;
  state.use_master(bucket, /*changes=*/false, [&](const at::Tensor& master) {
    flat = joined_slices(state, bucket, master, cat("master weights of bucket ", bucket));
  });
  return flat;
}

at::Tensor joined_over_axis(const ModelState& state, const zero::Parameter& parameter, const at::Tensor& values) {
  if (!parameter.part) return values;
  return state.tensor->joined(values.to(state.ranks.device), *parameter.part).to(values.device());
}

std::vector<std::pair<std::string, at::Tensor>> whole_module(const ModelState& state) {
  std::unordered_map<const void*, at::Tensor> found;  // by identity of what is trained
  for_each_whole_bucket(state, 0, [&](const zero::ParameterBucket& bucket) {
    for (const zero::Parameter& parameter : bucket.parameters()) {
      found[parameter.tensor.unsafeGetTensorImpl()] = copy_on_host(parameter.tensor.detach());
    }
  });
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

namespace {

// whole_masters(), with `flat_of(bucket)` in place of whole_master().
std::vector<std::pair<std::string, at::Tensor>> whole_weights(const ModelState& state, bool wanted,
                                                              const std::function<at::Tensor(size_t)>& flat_of) {
  const auto cast = [](const at::Tensor& tensor) {
    return copy_on_host(tensor.detach().to(optimizers::state_type(tensor.scalar_type())));
  };
  std::vector<at::Tensor> own(state.parameters.size());
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    const zero::BucketLayout& layout = state.buckets[b].layout();
    const at::Tensor flat = flat_of(b);
    for (const Segment& segment : layout.segments) {
      const auto index = static_cast<size_t>(segment.parameter);
      if (!wanted && !state.parameters[index].part) continue;  // of a split one the ranks of its axis want the part
      own[index] = cast(zero::view_of(flat, segment, state.parameters[index].tensor));
    }
  }
  std::vector<std::pair<std::string, at::Tensor>> result;
  const auto add = [&](const zero::Parameter& parameter, const at::Tensor& values) {
    at::Tensor whole = joined_over_axis(state, parameter, values);
    if (wanted) result.emplace_back(parameter.name, std::move(whole));
  };
  for (size_t i = 0; i < own.size(); ++i) add(state.parameters[i], own[i]);
  std::unordered_map<const void*, at::Tensor> gathered;
  for_each_whole_bucket(state, state.buckets.size(), [&](const zero::ParameterBucket& bucket) {
    for (const zero::Parameter& one : bucket.parameters()) {
      if (wanted || one.part) gathered[one.tensor.unsafeGetTensorImpl()] = cast(one.tensor);
    }
  });
  for (const zero::Parameter& frozen : state.frozen) {
    if (!wanted && !frozen.part) continue;
    const auto found = gathered.find(frozen.tensor.unsafeGetTensorImpl());
    add(frozen, found == gathered.end() ? cast(frozen.tensor) : found->second);
  }
  return result;
}

}  // namespace

std::vector<std::pair<std::string, at::Tensor>> whole_masters(const ModelState& state, bool wanted) {
  return whole_weights(state, wanted, [&](size_t b) { return whole_master(state, b); });
}

std::vector<std::pair<std::string, at::Tensor>> whole_averages(const ModelState& state) {
  return whole_weights(state, /*wanted=*/true, [&](size_t b) {
    return joined_slices(state, b, state.average->values(b), cat("averaged weights of bucket ", b));
  });
}

}  // namespace ds::engine
