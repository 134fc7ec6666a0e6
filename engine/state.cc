// Reading the engine's state: whole parameters, masters, bytes.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <unordered_map>
#include <utility>

#include "engine/engine_impl.h"

namespace ds::engine {
namespace {

at::Tensor copy_on_host(const at::Tensor& tensor) { return tensor.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true); }

}  // namespace

void Engine::Impl::for_each_whole_bucket(size_t first, const std::function<void(const zero::ParameterBucket&)>& use) {
  for (size_t b = first; b < buckets.size() + frozen_buckets.size(); ++b) {
    gatherer->gather(b);
    use(b < buckets.size() ? buckets[b] : frozen_buckets[b - buckets.size()]);
    gatherer->drop(b);
  }
}

int64_t Engine::Impl::frozen_elements() const {
  int64_t elements = 0;
  if (gatherer) {
    for (const zero::ParameterBucket& bucket : frozen_buckets) {
      elements += bucket.sharded() ? bucket.layout().slice_numel : bucket.layout().numel;
    }
    return elements;
  }
  for (const zero::Parameter& parameter : frozen) elements += parameter.tensor.numel();
  return elements;
}

std::vector<std::pair<std::string, at::Tensor>> Engine::module_state_dict() {
  const at::NoGradGuard no_grad;
  synchronize_parameters();
  std::unordered_map<const void*, at::Tensor> gathered;  // by identity; empty below stage 3
  if (impl_->gatherer) {
    impl_->for_each_whole_bucket(0, [&](const zero::ParameterBucket& bucket) {
      for (const zero::Parameter& parameter : bucket.parameters()) {
        gathered[parameter.tensor.unsafeGetTensorImpl()] = copy_on_host(parameter.tensor.detach());
      }
    });
  }
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (const auto& item : impl_->module->named_parameters()) {
    const auto found = gathered.find(item.value().unsafeGetTensorImpl());
    result.emplace_back(item.key(), found == gathered.end() ? copy_on_host(item.value().detach()) : found->second);
  }
  for (const auto& item : impl_->module->named_buffers()) {
    result.emplace_back(item.key(), copy_on_host(item.value()));
  }
  return result;
}

std::vector<std::pair<std::string, at::Tensor>> Engine::fp32_state_dict() {
  const at::NoGradGuard no_grad;
  synchronize_parameters();
  std::vector<at::Tensor> whole(impl_->parameters.size());
  for (size_t b = 0; b < impl_->buckets.size(); ++b) {
    const zero::BucketLayout& layout = impl_->buckets[b].layout();
    at::Tensor flat = impl_->masters[b];
    const bool whole_masters = impl_->buckets[b].flat().scalar_type() == at::kFloat && !impl_->buckets[b].sharded();
    if (whole_masters) {
      flat = impl_->buckets[b].flat();
    } else if (impl_->plan.partition_optimizer && impl_->communicator->size() > 1) {
      flat = at::empty({layout.numel}, impl_->masters[b].options());
      impl_->communicator->all_gather(flat, impl_->masters[b], cat("master weights of bucket ", b)).wait();
    }
    for (const Segment& segment : layout.segments) {
      const auto index = static_cast<size_t>(segment.parameter);
      whole[index] = copy_on_host(zero::view_of(flat, segment, impl_->parameters[index].tensor));
    }
  }
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (size_t i = 0; i < whole.size(); ++i) result.emplace_back(impl_->parameters[i].name, std::move(whole[i]));
  if (!impl_->gatherer) {
    for (const zero::Parameter& frozen : impl_->frozen) {
      result.emplace_back(frozen.name, copy_on_host(frozen.tensor.detach().to(at::kFloat)));
    }
    return result;
  }
  impl_->for_each_whole_bucket(impl_->buckets.size(), [&](const zero::ParameterBucket& bucket) {
    for (const zero::Parameter& frozen : bucket.parameters()) {
      result.emplace_back(frozen.name, copy_on_host(frozen.tensor.detach().to(at::kFloat)));
    }
  });
  return result;
}

Engine::ModelStateBytes Engine::model_state_bytes() const {
  ModelStateBytes bytes;
  for (const zero::ParameterBucket& bucket : impl_->buckets) bytes.parameters += bucket.held_bytes();
  for (const zero::ParameterBucket& bucket : impl_->frozen_buckets) bytes.parameters += bucket.held_bytes();
  if (!impl_->gatherer) {
    for (const zero::Parameter& parameter : impl_->frozen)
      bytes.parameters += static_cast<int64_t>(parameter.tensor.nbytes());
  }
  for (size_t b = 0; b < impl_->buckets.size(); ++b) {
    const zero::ParameterBucket& bucket = impl_->buckets[b];
    const at::Tensor kept = bucket.sharded() ? bucket.slice(impl_->communicator->rank()) : bucket.flat();
    if (!impl_->masters[b].is_alias_of(kept)) bytes.master += static_cast<int64_t>(impl_->masters[b].nbytes());
  }
  bytes.gradients = impl_->gradient_bytes;
  if (impl_->optimizer) bytes.optimizer = impl_->optimizer->state_bytes();
  return bytes;
}

}  // namespace ds::engine
