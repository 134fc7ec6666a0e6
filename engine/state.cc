// Reading the engine's state: whole parameters, masters, bytes.
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "engine/engine_impl.h"
#include "zero/gathered_scope.h"

namespace ds::engine {
namespace {

// Copies of a weight on other stages would keep the old values for good.
void require_on_one_stage(const PipelineParts& parts, const torch::nn::Module& module,
                          const std::set<const void*>& wanted) {
  for (const auto& item : module.named_parameters()) {
    const void* const parameter = item.value().unsafeGetTensorImpl();
    if (!wanted.contains(parameter)) continue;
    for (const TiedWeights& tied : parts.tied) {
      const bool is_tied = std::any_of(tied.parameters.begin(), tied.parameters.end(), [&](const at::Tensor& tensor) {
        return tensor.unsafeGetTensorImpl() == parameter;
      });
      require(
          !is_tied || !tied.ranks || tied.ranks->size() == 1, "gathered_parameters: expected no modifier rank with ",
          item.key(), ", which is tied: other ranks of the pipeline have copies, which would keep the old values. ",
          "Read it without a modifier rank; change it before initialize(), or load a checkpoint with the new values");
    }
  }
}

at::Tensor copy_on_host(const at::Tensor& tensor) { return tensor.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true); }

}  // namespace

void Engine::Impl::for_each_whole_bucket(size_t first, const std::function<void(const zero::ParameterBucket&)>& use) {
  for (size_t b = first; b < buckets.size() + frozen_buckets.size(); ++b) {
    gatherer->gather(b);
    try {
      use(b < buckets.size() ? buckets[b] : frozen_buckets[b - buckets.size()]);
    } catch (...) {
      gatherer->drop(b);
      throw;
    }
    gatherer->drop(b);
  }
}

void Engine::Impl::take_over_changes(size_t bucket) {
  at::autocast::clear_cache();           // of this thread: casted copies of the weights before
  if (bucket >= buckets.size()) return;  // frozen
  const at::NoGradGuard no_grad;
  at::Tensor own = plan.partition_optimizer ? buckets[bucket].slice(groups.shards->rank()) : buckets[bucket].flat();
  if (own.is_alias_of(masters[bucket])) return;
  buckets[bucket].use_slice(/*changes=*/false, [&] {
    use_master(bucket, /*changes=*/true, [&](const at::Tensor& master) {
      own = own.to(master.device());
      // What was not changed keeps the precision that only the master has, and what ranks have stepped by themselves.
      const at::Tensor before = optimizer ? optimizer->weights(static_cast<int64_t>(bucket)) : master;
      at::Tensor(master).copy_(at::where(before.to(own.scalar_type()) == own, master, own.to(master.scalar_type())));
    });
  });
}

// All ranks' masters of a bucket, float32 [layout.numel].
at::Tensor Engine::Impl::whole_master(size_t bucket) {
  const zero::ParameterBucket& parameters_of = buckets[bucket];
  if (!plan.separate_master && !parameters_of.sharded()) return parameters_of.flat();
  at::Tensor flat;
  use_master(bucket, /*changes=*/false, [&](const at::Tensor& master) {
    const bool joins = plan.partition_optimizer && groups.shards->size() > 1;
    const at::Tensor own = master.to(device);
    flat = joins ? at::empty({parameters_of.layout().numel}, own.options()) : own.clone();
    if (joins) groups.shards->all_gather(flat, own, cat("master weights of bucket ", bucket)).wait();
  });
  return flat;
}

void Engine::Impl::use_master(size_t bucket, bool changes, const std::function<void(const at::Tensor&)>& use) {
  if (!offloaded) return use(masters[bucket]);
  roll_back_speculation();
  offloaded->use(bucket, changes, [&] { use(masters[bucket]); });
}

zero::GatheredParameters Engine::gathered_parameters(const std::vector<at::Tensor>& parameters,
                                                     std::optional<int> modifier_rank) {
  Impl& self = *impl_;
  self.require_states_here("gathered_parameters()");
  require(!modifier_rank || (*modifier_rank >= 0 && *modifier_rank < self.communicator->size()),
          "gathered_parameters: modifier_rank: expected a rank from 0 to ", self.communicator->size() - 1, ", found ",
          modifier_rank.value_or(0));
  require(!modifier_rank || self.read_only_scopes == 0, "gathered_parameters: a scope with a modifier rank cannot be ",
          "opened inside one without; close the outer one first, or give it a modifier rank too");
  synchronize_parameters();
  if (modifier_rank) self.saving.wait_copied();
  std::set<const void*> wanted;
  for (const at::Tensor& parameter : parameters) wanted.insert(parameter.unsafeGetTensorImpl());
  if (modifier_rank && self.pipeline) require_on_one_stage(*self.pipeline, *self.module, wanted);
  const auto take = [&](const zero::Parameter& parameter) {
    return wanted.erase(parameter.tensor.unsafeGetTensorImpl()) > 0;
  };
  zero::GatheredParameters::Scope scope;
  const auto add_buckets = [&](std::vector<zero::ParameterBucket>& from, size_t first) {
    for (size_t b = 0; b < from.size(); ++b) {
      const auto& in_bucket = from[b].parameters();
      if (std::count_if(in_bucket.begin(), in_bucket.end(), take) > 0) scope.buckets.emplace_back(first + b, &from[b]);
    }
  };
  add_buckets(self.buckets, 0);
  add_buckets(self.frozen_buckets, self.buckets.size());
  if (!self.gatherer) std::copy_if(self.frozen.begin(), self.frozen.end(), std::back_inserter(scope.others), take);
  require(wanted.empty(), "gathered_parameters: ", wanted.size(), " of ", parameters.size(),
          " tensors are no parameters of the engine's model; expected tensors as model->parameters() has them");
  scope.gatherer = self.gatherer;
  scope.world = self.communicator.get();
  scope.modifier_rank = modifier_rank;
  scope.changed = [&self](size_t bucket) { self.take_over_changes(bucket); };
  const int read_only = modifier_rank ? 0 : 1;
  scope.closed = [&self, read_only] {
    if (read_only == 0) at::autocast::clear_cache();  // casted in the scope, perhaps before its end or an exception
    --self.gathered_scopes;
    self.read_only_scopes -= read_only;
  };
  ++self.gathered_scopes;
  self.read_only_scopes += read_only;
  return zero::GatheredParameters(std::move(scope));
}

int64_t Engine::Impl::frozen_bytes() const {
  int64_t bytes = 0;
  for (const zero::ParameterBucket& bucket : frozen_buckets) bytes += bucket.held_bytes();
  if (gatherer) return bytes;
  for (const zero::Parameter& parameter : frozen) bytes += static_cast<int64_t>(parameter.tensor.nbytes());
  return bytes;
}

int64_t Engine::Impl::device_state_bytes() const {
  if (plan.error_feedback) return optimizer->state_bytes();  // nothing of it is elsewhere
  int64_t bytes = 0;
  for (size_t b = 0; optimizer && b < buckets.size(); ++b) {
    if (offloaded && offloaded->updates(b)) continue;
    for (const auto& [name, state] : optimizer->states(static_cast<int64_t>(b))) {
      bytes += static_cast<int64_t>(state.nbytes());
    }
  }
  return bytes;
}

std::vector<std::pair<std::string, at::Tensor>> Engine::module_state_dict() {
  const at::NoGradGuard no_grad;
  impl_->require_whole_state("module_state_dict()");
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
  impl_->require_whole_state("fp32_state_dict()");
  synchronize_parameters();
  std::vector<at::Tensor> whole(impl_->parameters.size());
  for (size_t b = 0; b < impl_->buckets.size(); ++b) {
    const zero::BucketLayout& layout = impl_->buckets[b].layout();
    const at::Tensor flat = impl_->whole_master(b);
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
  impl_->require_states_here("model_state_bytes()");
  ModelStateBytes bytes;
  for (const zero::ParameterBucket& bucket : impl_->buckets) bytes.parameters += bucket.held_bytes();
  bytes.parameters += impl_->frozen_bytes();
  for (size_t b = 0; b < impl_->buckets.size(); ++b) {
    if (impl_->offloaded && impl_->offloaded->updates(b)) continue;
    const zero::ParameterBucket& bucket = impl_->buckets[b];
    if (!impl_->masters[b].is_alias_of(bucket.kept())) bytes.master += static_cast<int64_t>(impl_->masters[b].nbytes());
  }
  bytes.optimizer = impl_->device_state_bytes();
  bytes.gradients = impl_->gradient_bytes;
  bytes.gathered = impl_->gathered_bytes;
  for (const zero::ParameterBucket& bucket : impl_->buckets) bytes.secondary += bucket.secondary_bytes();
  for (const zero::ParameterBucket& bucket : impl_->frozen_buckets) bytes.secondary += bucket.secondary_bytes();
  return bytes;
}

zero::OffloadedBytes Engine::offloaded_state_bytes() const {
  return impl_->offloaded ? impl_->offloaded->bytes() : zero::OffloadedBytes();
}

}  // namespace ds::engine
