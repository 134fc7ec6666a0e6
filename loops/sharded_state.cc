#include "loops/sharded_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <exception>
#include <functional>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "core/tensor_check.h"
#include "engine/agreement/shared_failure.h"
#include "engine/state/whole_state.h"
#include "loops/own_parts.h"

namespace ds::loops {
namespace {

at::Tensor host_copy(const at::Tensor& tensor) {
  return tensor.detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
}

// Frozen parameters too: of each the part that this rank has, which stays where it is.
std::vector<OwnPart> own_parts(const ShardedModel& model) {
  const engine::ModelState& state = model.state();
  std::vector<OwnPart> parts;
  for (const SliceLeaf& leaf : model.leaves()) {
    parts.push_back({leaf.name, state.infos[leaf.parameter].sizes, leaf.place.parameter_offset, leaf.tensor.detach()});
  }
  const int rank = model.ranks().shards->rank();
  for (const zero::ParameterBucket& bucket : state.frozen_buckets) {
    const at::Tensor slice = bucket.slice(rank);
    for (const Segment& own : zero::slice_segments(bucket.layout(), rank)) {
      const zero::Parameter& parameter = state.frozen[static_cast<size_t>(own.parameter)];
      parts.push_back({parameter.name, parameter.tensor.sizes().vec(), own.parameter_offset,
                       slice.narrow(0, own.slice_offset, own.length)});
    }
  }
  if (!state.frozen_buckets.empty()) return parts;
  for (const zero::Parameter& frozen : state.frozen) {
    parts.push_back({frozen.name, frozen.tensor.sizes().vec(), 0, frozen.tensor.detach().view({-1})});
  }
  return parts;
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

using ValuesByName = std::unordered_map<std::string, at::Tensor>;

ValuesByName by_name(const StateDict& state, const char* call) {
  ValuesByName values;
  for (const auto& [name, tensor] : state) {
    require(values.emplace(name, tensor).second, call, ": expected each name once, found ", name, " twice");
  }
  return values;
}

void require_shape(const char* call, const std::string& name, const at::Tensor& value, at::IntArrayRef sizes) {
  require(value.defined() && value.sizes() == sizes, call, ": ", name, ": expected a tensor of shape ", sizes,
          ", found ", describe(value));
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

// One name after the other, in module order: `value_of` gives the whole.
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
    const at::Tensor whole = value_of(item.key(), item.value()).reshape({-1});
    const auto part = parts.find(item.key());
    if (part == parts.end()) continue;  // a frozen one of other ranks
    const at::Tensor& own = part->second.values;
    at::Tensor(own).copy_(whole.narrow(0, part->second.offset, own.numel()));
  }
  for (const auto& item : module.named_buffers()) at::Tensor(item.value()).copy_(value_of(item.key(), item.value()));
  model.slices_changed();
}

// What trained parameters are kept in, and others too.
at::ScalarType kept_dtype(const ShardedModel& model, const at::Tensor& of_module) {
  const std::vector<at::Tensor>& masters = model.state().masters;
  return of_module.requires_grad() && !masters.empty() ? masters.front().scalar_type() : of_module.scalar_type();
}

}  // namespace

StateDict full_state(const ShardedModel& model, const FullStateOptions& options) {
  const bool wanted = !options.rank0_only || model.ranks().all->rank() == 0;
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
  comm::Communicator& ranks = *model.ranks().all;
  const bool reads = !broadcast || ranks.rank() == 0;
  ValuesByName values;
  std::exception_ptr failure;
  try {
    if (reads) values = by_name(state, "load_full_state_dict");
    if (reads) require_names(model, values);
  } catch (...) {
    failure = std::current_exception();
  }
  if (!broadcast) {
    if (failure) std::rethrow_exception(failure);
    take_wholes(model, [&](const std::string& name, const at::Tensor& /*of_module*/) { return values.at(name); });
    return;
  }
  const int failed = engine::failed_rank(failure, model.ranks().device, ranks);
  require(failed < 0, "load_full_state_dict: the state of rank ", failed,
          " does not fit the module, its message says why");
  take_wholes(model, [&](const std::string& name, const at::Tensor& of_module) {
    const at::TensorOptions options =
        at::TensorOptions().dtype(kept_dtype(model, of_module)).device(model.ranks().device);
    const at::Tensor value = reads ? values.at(name).to(options).contiguous() : at::empty(of_module.sizes(), options);
    ranks.broadcast(value, 0, cat("full state: ", name)).wait();
    return value;
  });
}

std::vector<ShardedTensor> sharded_state(const ShardedModel& model) {
  std::vector<ShardedTensor> state;
  for (const OwnPart& part : own_parts(model)) {
    state.push_back({.name = part.name, .sizes = part.sizes, .offset = part.offset, .values = host_copy(part.values)});
  }
  return state;
}

void load_sharded_state(ShardedModel& model, const std::vector<ShardedTensor>& parts) {
  const at::NoGradGuard no_grad;
  const GivenParts given = given_parts(parts);
  const std::vector<OwnPart> own = own_parts(model);
  for (const OwnPart& part : own) require_covered("load_sharded_state_dict", part, given);
  for (const OwnPart& part : own) copy_parts(part, given);
  model.slices_changed();
}

StateDict local_state(const ShardedModel& model) {
  StateDict state;
  for (const SliceLeaf& leaf : model.leaves()) state.emplace_back(leaf.name, host_copy(leaf.tensor));
  return state;
}

void load_local_state(ShardedModel& model, const StateDict& state) {
  const at::NoGradGuard no_grad;
  const ValuesByName values = by_name(state, "load_local_state_dict");
  for (const SliceLeaf& leaf : model.leaves()) {
    const auto found = values.find(leaf.name);
    require(found != values.end(), "load_local_state_dict: expected a slice of ", leaf.name, ", found none");
    require_shape("load_local_state_dict", leaf.name, found->second, leaf.tensor.sizes());
  }
  for (const SliceLeaf& leaf : model.leaves()) leaf.tensor.detach().copy_(values.at(leaf.name));
  model.slices_changed();
}

}  // namespace ds::loops
