#include "loops/optimizer_states.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <torch/optim/adagrad.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <typeinfo>
#include <utility>

#include "core/check.h"
#include "optim/elementwise_probe.h"
#include "optim/written_states.h"

namespace ds::loops {
namespace {

using optimizers::ClientState;

std::vector<ClientState> kinds_of(torch::optim::Optimizer& optimizer, const char* call) {
  if (auto of_torch = optimizers::states_of_torch(optimizer)) return *std::move(of_torch);
  const std::string name = optimizers::client_name(optimizer);
  require(name != "LBFGS", call, ": expected an optimizer that updates each element by itself, found LBFGS, whose ",
          "history is of whole parameters; it does not work on slices");
  optimizers::ElementwiseProbe probe = optimizers::probe_elementwise(optimizer);
  require(probe.problem.empty(), call, ": ", name, " ", probe.problem,
          "; expected an optimizer that updates each element by itself, which slices need");
  for (const ClientState& kind : probe.states) {
    require(kind.is_known, call, ": ", name, ": expected states whose tensors have names, found a class of its own; ",
            "derive its state from torch::optim::OptimizerCloneableParamState and write serialize()");
  }
  return std::move(probe.states);
}

bool has_name(const ClientState& kind, const std::string& name) {
  return std::find(kind.names.begin(), kind.names.end(), name) != kind.names.end();
}

// Whether there is anything between steps.
void read_state_of(torch::optim::OptimizerParamState& state, const char* call, LeafStates& into) {
  if (const auto fields = optimizers::fields_of(state)) {
    for (const auto& [name, tensor] : fields->tensors) {
      if (tensor->defined() && has_name(*into.kind, name)) {
        into.tensors.emplace_back(name, tensor->detach().reshape({-1}));
      }
    }
    into.steps = fields->step ? *fields->step : into.tensors.empty() ? 0 : 1;
    return;
  }
  auto written = optimizers::written_state(state);
  require(written.has_value(), call, ": ", into.leaf->name,
          ": expected a state that serialize() writes as tensors and ", "whole numbers, found another one");
  for (const auto& [name, tensor] : written->tensors) {
    if (has_name(*into.kind, name)) into.tensors.emplace_back(name, tensor.reshape({-1}));
  }
  const auto& counters = into.kind->counters;
  into.steps = counters.empty() ? 1 : written->numbers[counters.front()];
}

}  // namespace

OptimizerStates::OptimizerStates(const ShardedModel& model, torch::optim::Optimizer& optimizer, const char* call)
    : model_(model), optimizer_(optimizer), call_(call), kinds_(kinds_of(optimizer, call)) {
  std::unordered_map<const void*, bool> known;
  for (const SliceLeaf& leaf : model.leaves()) known[leaf.tensor.unsafeGetTensorImpl()] = true;
  const auto& groups = optimizer.param_groups();
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const at::Tensor& parameter : groups[g].params()) {
      require(known.contains(parameter.unsafeGetTensorImpl()), call, ": expected an optimizer over ",
              "sharded->parameters() of this model, found a tensor of shape ", parameter.sizes(), " in its group ", g,
              " that is none of them");
      group_of_[parameter.unsafeGetTensorImpl()] = g;
    }
  }
}

bool OptimizerStates::counts_steps(const ClientState& kind) {
  if (!kind.prototype) return false;
  if (kind.is_written) return !kind.counters.empty();
  const auto state = kind.prototype->clone();
  const auto fields = optimizers::fields_of(*state);
  return fields && fields->step != nullptr;
}

std::vector<LeafStates> OptimizerStates::leaves() const {
  std::vector<LeafStates> result;
  for (const SliceLeaf& leaf : model_.leaves()) {
    const auto group = group_of_.find(leaf.tensor.unsafeGetTensorImpl());
    if (group != group_of_.end()) result.push_back({.leaf = &leaf, .kind = &kinds_[group->second]});
  }
  return result;
}

std::vector<LeafStates> OptimizerStates::read() const {
  std::vector<LeafStates> result = leaves();
  for (LeafStates& one : result) {
    const auto found = optimizer_.state().find(one.leaf->tensor.unsafeGetTensorImpl());
    if (found == optimizer_.state().end() || !found->second || !one.kind->prototype) continue;
    read_state_of(*found->second, call_, one);
    require(one.steps == 0 || one.tensors.size() == one.kind->names.size(), call_, ": ", one.leaf->name, ": expected ",
            one.kind->names.size(), " tensors in the optimizer's state, as its options say, found ",
            one.tensors.size());
  }
  return result;
}

// torch's Adagrad makes its states when it is made, and expects to find them.
void OptimizerStates::begin_anew(const LeafStates& states) const {
  void* const key = states.leaf->tensor.unsafeGetTensorImpl();
  if (typeid(optimizer_) != typeid(torch::optim::Adagrad)) {
    optimizer_.state().erase(key);
    return;
  }
  const auto& group = optimizer_.param_groups()[group_of_.at(key)];
  const auto& options = static_cast<const torch::optim::AdagradOptions&>(group.options());
  auto state = std::make_unique<torch::optim::AdagradParamState>();
  state->step(0);
  state->sum(at::full_like(states.leaf->tensor.detach(), options.initial_accumulator_value()));
  optimizer_.state()[key] = std::move(state);
}

void OptimizerStates::give(const LeafStates& states) const {
  const ClientState& kind = *states.kind;
  void* const key = states.leaf->tensor.unsafeGetTensorImpl();
  if (!kind.prototype || states.steps == 0) {
    begin_anew(states);
    return;
  }
  std::unique_ptr<torch::optim::OptimizerParamState> state = kind.prototype->clone();
  if (kind.is_written) {
    optimizers::WrittenState values{.tensors = states.tensors, .numbers = {}};
    for (const std::string& counter : kind.counters) values.numbers[counter] = states.steps;
    optimizers::read_state(*state, values);
  } else {
    const auto fields = optimizers::fields_of(*state);
    ensure(fields.has_value(), "a state of torch's");
    for (const auto& [name, tensor] : fields->tensors) {
      for (const auto& [given, values] : states.tensors) {
        if (given == name) *tensor = values.clone();
      }
    }
    if (fields->step) *fields->step = states.steps;
  }
  optimizer_.state()[key] = std::move(state);
}

}  // namespace ds::loops
