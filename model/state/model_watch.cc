#include "model/state/model_watch.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <string>
#include <utility>

#include "core/check.h"
#include "core/check_time.h"
#include "core/tensor_check.h"
#include "core/text_hash.h"
#include "model/state/parameter_scope.h"
#include "zero/value_digest.h"

namespace ds::engine {
namespace {

std::vector<const void*> identities_of(const torch::nn::Module& module) {
  std::vector<const void*> identities;
  module.apply([&](const torch::nn::Module& part) {
    for (const auto& item : part.named_parameters(/*recurse=*/false)) {
      identities.push_back(trained_tensor(item.value()).unsafeGetTensorImpl());
    }
  });
  return identities;
}

constexpr const char* kInScope =
    "Load or set parameters before initialize(), or in a scope of engine->gathered_parameters(model->parameters(), "
    "/*modifier_rank=*/0), which casts them";

}  // namespace

ModelWatch::ModelWatch(ModelState& state, checkpoint::BackgroundSave& saving) : state_(state), saving_(saving) {
  for (const zero::Parameter& parameter : state.parameters) trained_.push_back({.parameter = &parameter});
  for (const zero::Parameter& parameter : state.frozen) others_.push_back({.parameter = &parameter});
  state.held_still.assign(trained_.size(), 0);
  identities_ = identities_of(*state.module);
  state.access->call_before_changes([&saving] { saving.wait_copied(); });
  renew();
}

ModelWatch::~ModelWatch() { state_.access->call_before_changes({}); }

void ModelWatch::renew() {
  const CheckTime::Scope time;
  state_.overwritten.clear();
  note_versions();
}

void ModelWatch::note_versions() {
  for (std::vector<Seen>* const list : {&trained_, &others_}) {
    for (Seen& seen : *list) seen.version = seen.parameter->tensor._version();
  }
}

void ModelWatch::renew(const std::vector<size_t>& buckets) {
  const CheckTime::Scope time;
  for (const size_t b : buckets) {
    for (const Segment& segment : bucket_at(b).layout().segments) {
      Seen& seen = list_of(b)[static_cast<size_t>(segment.parameter)];
      seen.version = seen.parameter->tensor._version();
    }
  }
}

void ModelWatch::updated() {
  const CheckTime::Scope time;
  bump_versions();
  renew();
}

void ModelWatch::average_shown(bool shown) {
  shows_average_ = shown;
  bump_versions();
  note_versions();
}

void ModelWatch::bump_versions() {
  for (const Seen& seen : trained_) {
    if (seen.parameter->tensor.requires_grad()) seen.parameter->tensor.unsafeGetTensorImpl()->bump_version();
  }
}

void ModelWatch::look(const char* call) {
  const CheckTime::Scope time;
  const at::NoGradGuard no_grad;
  if (state_.tensor) {
    state_.tensor->require_leaves(call);
    state_.tensor->follow_flags();
  }
  note_frozen(call);
  look_at_buckets(call, state_.buckets, 0);
  look_at_buckets(call, state_.frozen_buckets, state_.buckets.size());
  for (const zero::ChangedBucket& changed : state_.access->take_changed()) {
    require_own_weights(call, changed.parameter);
    require_no_update_beside(call, changed.parameter);
    saving_.wait_copied();
    take_over_changes(state_, changed.bucket);
    note(changed.parameter, changed.digest, bucket_at(changed.bucket).parameters().front().part != nullptr);
  }
}

void ModelWatch::note_frozen(const char* call) {
  frozen_ = 0;
  for (size_t i = 0; i < trained_.size(); ++i) {
    const bool frozen = !trained_[i].parameter->tensor.requires_grad();
    state_.held_still[i] = frozen ? 1 : 0;
    if (frozen) ++frozen_;
  }
  for (const Seen& seen : others_) {
    require(!seen.parameter->tensor.requires_grad(), call, ": parameter ", seen.parameter->name,
            " requires a gradient now; it was frozen when initialize() ran, so that the engine has no optimizer state ",
            "for it and would never train it. Let it require a gradient at initialize() and freeze it afterwards ",
            "with set_requires_grad(false): it then stays as it is until it is unfrozen");
  }
}

void ModelWatch::look_at_buckets(const char* call, std::vector<zero::ParameterBucket>& buckets, size_t first) {
  for (size_t b = 0; b < buckets.size(); ++b) {
    zero::ParameterBucket& bucket = buckets[b];
    const std::vector<Segment>& segments = bucket.layout().segments;
    std::vector<Seen>& list = list_of(first + b);
    for (size_t i = 0; i < segments.size(); ++i) {
      Seen& seen = list[static_cast<size_t>(segments[i].parameter)];
      if (!bucket.storage().is_here(i)) {
        take_over(call, first + b, i);
      } else if (const int64_t version = seen.parameter->tensor._version(); version == seen.version) {
        continue;
      } else if (!bucket.sharded()) {
        require_own_weights(call, seen.parameter->name);
        require_no_update_beside(call, seen.parameter->name);
        saving_.wait_copied();
        state_.access->wait_all();
        note(seen.parameter->name, zero::digest_of(seen.parameter->tensor), seen.parameter->part != nullptr);
        take_over_changes(state_, first + b);
      }
      seen.version = seen.parameter->tensor._version();
    }
  }
}

zero::ParameterBucket& ModelWatch::bucket_at(size_t bucket) const {
  const size_t trained = state_.buckets.size();
  return bucket < trained ? state_.buckets[bucket] : state_.frozen_buckets[bucket - trained];
}

void ModelWatch::take_over(const char* call, size_t index, size_t position) {
  zero::ParameterBucket& bucket = bucket_at(index);
  const zero::Parameter& parameter = bucket.parameters()[position];
  const at::Tensor& tensor = parameter.tensor;
  require_own_weights(call, parameter.name);
  require(tensor.scalar_type() == bucket.flat().scalar_type() && tensor.device() == bucket.flat().device(), call,
          ": parameter ", parameter.name, ": its memory was replaced since the engine took it over (model->to(), ",
          "torch::load(), set_data()). Expected ", bucket.flat().scalar_type(), " on ", bucket.flat().device(),
          " as before, found ", describe(tensor), ". ", kInScope);
  const bool in_use = state_.plan.offload.delayed || state_.plan.offload.speculative || bucket.kept_slice().bits() > 0;
  require(!in_use, call, ": parameter ", parameter.name, ": its memory was replaced since the engine took it over ",
          "(torch::load(), set_data()), which cannot be followed with delayed_update, super_offload and ",
          "zero_quantized_nontrainable_weights. ", kInScope);
  saving_.wait_copied();
  state_.access->wait_all();
  const at::Tensor values = bucket.take_value_back(position, state_.groups_of(index).shards.rank());
  note(parameter.name, zero::digest_of(values), parameter.part != nullptr);
  take_over_changes(state_, index);
}

void ModelWatch::require_no_update_beside(const char* call, const std::string& parameter) const {
  const zero::Offload& offload = state_.plan.offload;
  require(!offload.delayed && !offload.speculative, call, ": parameter ", parameter, ": it was changed in place since ",
          "the engine updated it last, while the update of ", offload.delayed ? "delayed_update" : "super_offload",
          " may run beside the program and would overwrite it. ", kInScope);
}

void ModelWatch::require_own_weights(const char* call, const std::string& parameter) const {
  require(!shows_average_, call, ": parameter ", parameter, ": it was changed inside an EmaScope, whose end gives it ",
          "back the value before if the engine trains it; change it outside of the scope");
}

void ModelWatch::note(const std::string& parameter, uint64_t digest, bool is_part) {
  digests_.all = digests_.all * 31 + fnv1a(parameter) + digest;
  // A sum: uneven parts may lie in other buckets, and come in another order, on each rank of the axis.
  digests_.axis += fnv1a(is_part ? parameter : cat(parameter, ' ', digest));
  last_changed_ = parameter;
}

void ModelWatch::look_at_module(const char* call) {
  const CheckTime::Scope time;
  std::vector<const void*> identities = identities_of(*state_.module);
  if (identities == identities_) return;
  std::vector<const void*> known;
  for (const std::vector<Seen>* const list : {&trained_, &others_}) {
    for (const Seen& seen : *list) known.push_back(seen.parameter->tensor.unsafeGetTensorImpl());
  }
  for (const auto& item : state_.module->named_parameters()) {
    const void* const identity = trained_tensor(item.value()).unsafeGetTensorImpl();
    const bool is_known = std::find(known.begin(), known.end(), identity) != known.end();
    require(is_known, call, ": parameter ", item.key(),
            " was registered after initialize(): the engine has no gradient ",
            "memory and no optimizer state for it and would never train or save it. Register it before initialize() ",
            "(frozen until it is wanted), or make the engine anew");
  }
  for (const std::vector<Seen>* const list : {&trained_, &others_}) {
    for (const Seen& seen : *list) {
      const void* const identity = seen.parameter->tensor.unsafeGetTensorImpl();
      const bool is_there = std::find(identities.begin(), identities.end(), identity) != identities.end();
      require(is_there, call, ": parameter ", seen.parameter->name,
              " is no longer in the module: it or the module that ",
              "has it was replaced after initialize(). Make the engine anew for the changed model");
    }
  }
  identities_ = std::move(identities);  // the same ones in another order
}

ModelWatch::Digests ModelWatch::take_digests() {
  Digests digests = std::exchange(digests_, {});
  if (frozen_ == 0) return digests;
  for (size_t i = 0; i < trained_.size(); ++i) {
    if (state_.held_still[i] == 0) continue;
    digests.all = digests.all * 31 + i + 1;
    digests.axis = digests.axis * 31 + i + 1;
  }
  return digests;
}

}  // namespace ds::engine
