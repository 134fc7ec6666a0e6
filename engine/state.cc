// Reading the engine's state: whole parameters, masters, bytes.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "engine/engine_impl.h"

namespace ds::engine {

std::vector<std::pair<std::string, at::Tensor>> Engine::module_state_dict() {
  const at::NoGradGuard no_grad;
  synchronize_parameters();
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (const auto& item : impl_->module->named_parameters()) {
    result.emplace_back(item.key(), item.value().detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
  }
  for (const auto& item : impl_->module->named_buffers()) {
    result.emplace_back(item.key(), item.value().detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
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
    if (impl_->buckets[b].flat().scalar_type() == at::kFloat) {
      flat = impl_->buckets[b].flat();
    } else if (impl_->plan.partition_optimizer && impl_->communicator->size() > 1) {
      flat = at::empty({layout.numel}, impl_->masters[b].options());
      impl_->communicator->all_gather(flat, impl_->masters[b], cat("master weights of bucket ", b)).wait();
    }
    for (const Segment& segment : layout.segments) {
      const auto index = static_cast<size_t>(segment.parameter);
      whole[index] = zero::view_of(flat, segment, impl_->parameters[index].tensor).to(at::kCPU, false, /*copy=*/true);
    }
  }
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (size_t i = 0; i < whole.size(); ++i) result.emplace_back(impl_->parameters[i].name, std::move(whole[i]));
  for (const zero::Parameter& frozen : impl_->frozen) {
    result.emplace_back(frozen.name, frozen.tensor.detach().to(at::kCPU, at::kFloat, false, /*copy=*/true));
  }
  return result;
}

Engine::ModelStateBytes Engine::model_state_bytes() const {
  ModelStateBytes bytes;
  for (const zero::ParameterBucket& bucket : impl_->buckets)
    bytes.parameters += static_cast<int64_t>(bucket.flat().nbytes());
  for (const zero::Parameter& parameter : impl_->frozen)
    bytes.parameters += static_cast<int64_t>(parameter.tensor.nbytes());
  for (size_t b = 0; b < impl_->buckets.size(); ++b) {
    if (!impl_->masters[b].is_alias_of(impl_->buckets[b].flat()))
      bytes.master += static_cast<int64_t>(impl_->masters[b].nbytes());
  }
  bytes.gradients = impl_->gradient_bytes;
  if (impl_->optimizer) bytes.optimizer = impl_->optimizer->state_bytes();
  return bytes;
}

}  // namespace ds::engine
