#include "loops/sharded_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <functional>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "loops/given_values.h"
#include "loops/own_parts.h"
#include "model/state/part_options.h"
#include "model/state/whole_state.h"

namespace ds::loops {
namespace {

at::Tensor host_copy(const at::Tensor& tensor) {
  return tensor.detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
}

// First names of the module's parameters by identity: what tied ones are stored under.
std::unordered_map<std::string, std::string> first_names(const torch::nn::Module& module) {
  std::unordered_map<const void*, std::string> first;
  std::unordered_map<std::string, std::string> names;
  for (const auto& item : module.named_parameters()) {
    names[item.key()] = first.emplace(item.value().unsafeGetTensorImpl(), item.key()).first->second;
  }
  return names;
}

// Every name of the module, with its shape, and no other.
void require_names(const ShardedModel& model, const ValuesByName& values) {
  constexpr const char* kCall = "load_full_state_dict";
  const torch::nn::Module& module = *model.state().module;
  size_t known = 0;
  const auto look = [&](const std::string& name, const at::Tensor& of_module) {
    const auto found = values.find(name);
    require(found != values.end(), kCall, ": expected a value for ", name, ", found none among ", values.size(),
            " names");
    require_shape(kCall, name, found->second, of_module.sizes());
    ++known;
  };
  for (const auto& item : module.named_parameters()) look(item.key(), item.value());
  for (const auto& item : module.named_buffers()) look(item.key(), item.value());
  if (known == values.size()) return;
  for (const auto& [name, value] : values) {
    const bool own = module.named_parameters().contains(name) || module.named_buffers().contains(name);
    require(own, kCall, ": expected names of the module's parameters and buffers alone, found ", name);
  }
}

// One name after the other, in module order: `value_of` gives the full tensor.
void take_wholes(ShardedModel& model,
                 const std::function<at::Tensor(const std::string&, const at::Tensor&)>& value_of) {
  const at::NoGradGuard no_grad;
  const torch::nn::Module& module = *model.state().module;
  std::unordered_map<std::string, OwnPart> parts;
  for (OwnPart& part : own_parts(model)) {
    std::string name = part.name;
    parts.emplace(std::move(name), std::move(part));
  }
  const auto names = first_names(module);
  for (const auto& item : module.named_parameters()) {
    if (names.at(item.key()) != item.key()) continue;
    const at::Tensor whole = value_of(item.key(), item.value());
    const auto part = parts.find(item.key());
    if (part == parts.end()) continue;  // a frozen one of other ranks
    at::Tensor(part->second.values).copy_(elements_of(part->second, whole));
  }
  for (const auto& item : module.named_buffers()) at::Tensor(item.value()).copy_(value_of(item.key(), item.value()));
  model.gathers().reshard_all();
}

// The tensors that trained parameters are kept in, and others too.
at::ScalarType kept_dtype(const ShardedModel& model, const at::Tensor& of_module) {
  const std::vector<at::Tensor>& masters = model.state().masters;
  return of_module.requires_grad() && !masters.empty() ? masters.front().scalar_type() : of_module.scalar_type();
}

}  // namespace

StateDict full_state(const ShardedModel& model, const FullStateOptions& options) {
  const bool wanted = !options.rank0_only || model.ranks().world->rank() == 0;
  ValuesByName values;
  for (auto& [name, value] : engine::whole_masters(model.state(), wanted)) values[name] = std::move(value);
  StateDict state;
  if (!wanted) return state;
  const torch::nn::Module& module = *model.state().module;
  const auto names = first_names(module);
  for (const auto& item : module.named_parameters()) state.emplace_back(item.key(), values.at(names.at(item.key())));
  for (const auto& item : module.named_buffers()) state.emplace_back(item.key(), host_copy(item.value()));
  return state;
}

void load_full_state(ShardedModel& model, const StateDict& state, bool broadcast) {
  const Givers givers{"load_full_state_dict", *model.ranks().world, model.ranks().device, broadcast};
  ValuesByName values;
  givers.check("the module", [&] {
    values = by_name(givers.call, state);
    require_names(model, values);
  });
  take_wholes(model, [&](const std::string& name, const at::Tensor& of_module) {
    if (!broadcast) return values.at(name);
    const at::TensorOptions options =
        at::TensorOptions().dtype(kept_dtype(model, of_module)).device(model.ranks().device);
    const at::Tensor value =
        givers.reads() ? values.at(name).to(options).contiguous() : at::empty(of_module.sizes(), options);
    givers.ranks.broadcast(value, 0, cat("full state: ", name)).wait();
    return value;
  });
}

std::vector<ShardedTensor> sharded_state(const ShardedModel& model) {
  std::vector<ShardedTensor> state;
  for (const OwnPart& part : own_parts(model)) {
    for (const OwnPart& run : runs_of(part)) {
      state.push_back({.name = run.name, .sizes = run.sizes, .offset = run.offset, .values = host_copy(run.values)});
    }
  }
  return state;
}

void load_sharded_state(ShardedModel& model, const std::vector<ShardedTensor>& parts) {
  const at::NoGradGuard no_grad;
  const GivenParts given = given_parts(parts);
  std::vector<OwnPart> own;
  for (const OwnPart& part : own_parts(model)) {
    for (OwnPart& run : runs_of(part)) own.push_back(std::move(run));
  }
  for (const OwnPart& part : own) require_covered("load_sharded_state_dict", part, given);
  for (const OwnPart& part : own) copy_parts(part, given);
  model.gathers().reshard_all();
}

StateDict local_state(const ShardedModel& model) {
  StateDict state;
  for (const SliceLeaf& leaf : model.leaves()) state.emplace_back(leaf.name, host_copy(leaf.tensor));
  return state;
}

void load_local_state(ShardedModel& model, const StateDict& state) {
  const at::NoGradGuard no_grad;
  const ValuesByName values = by_name("load_local_state_dict", state);
  for (const SliceLeaf& leaf : model.leaves()) {
    const auto found = values.find(leaf.name);
    require(found != values.end(), "load_local_state_dict: expected a slice of ", leaf.name, ", found none");
    require_shape("load_local_state_dict", leaf.name, found->second, leaf.tensor.sizes());
  }
  for (const SliceLeaf& leaf : model.leaves()) leaf.tensor.detach().copy_(values.at(leaf.name));
  model.gathers().reshard_all();
}

zero::HeldBytes held_bytes(const ShardedModel& model) {
  const engine::ModelState& state = model.state();
  zero::HeldBytes bytes;
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(engine::scalar_type(state.plan.model_dtype)));
  const int64_t whole = state.gatherer->buckets().counts().live * element_bytes;
  for (const zero::ParameterBucket& bucket : state.buckets) bytes.parameters += bucket.held_bytes();
  for (const zero::ParameterBucket& bucket : state.frozen_buckets) bytes.parameters += bucket.held_bytes();
  bytes.parameters -= whole;
  bytes.gathered = whole;
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    const at::Tensor& master = state.masters[b];
    if (!master.is_alias_of(state.buckets[b].kept())) bytes.master += static_cast<int64_t>(master.nbytes());
  }
  for (const SliceLeaf& leaf : model.leaves()) {
    const at::Tensor& gradient = leaf.tensor.grad();
    if (gradient.defined()) bytes.gradients += static_cast<int64_t>(gradient.nbytes());
  }
  return bytes;
}

}  // namespace ds::loops
