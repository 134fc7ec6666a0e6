// An optimizer's states by name: "state.PARAMETER.KEY", and "state.PARAMETER.step", as torch's flattened ones.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "loops/given_values.h"
#include "loops/optimizer_states.h"
#include "loops/own_parts.h"
#include "model/state/whole_state.h"

namespace ds::loops {
namespace {

constexpr const char* kStep = "step";

std::string key_of(const LeafStates& one, const std::string& name) { return cat("state.", one.leaf->name, ".", name); }

at::Tensor steps_tensor(int64_t steps) { return at::full({}, steps, at::kLong); }

const zero::Parameter& parameter_of(const OptimizerStates& states, const LeafStates& one) {
  return states.model().state().parameters[one.leaf->parameter];
}

std::vector<int64_t> sizes_of(const OptimizerStates& states, const LeafStates& one) {
  return parameter_of(states, one).whole_sizes();
}

// The values that the leaf has of a state.
OwnPart own_part_of(const OptimizerStates& states, const LeafStates& one, std::string key, const at::Tensor& values) {
  return {std::move(key), sizes_of(states, one), one.leaf->place.parameter_offset, values,
          parameter_of(states, one).part};
}

// This rank's slice of a bucket with what its leaves have under a name, zeros elsewhere.
at::Tensor slice_with(const OptimizerStates& states, const std::vector<LeafStates>& all, size_t bucket,
                      const std::string& name) {
  const at::Tensor flat = at::zeros_like(states.model().state().masters[bucket].detach());
  for (const LeafStates& one : all) {
    if (one.leaf->bucket != bucket) continue;
    for (const auto& [own, values] : one.tensors) {
      if (own == name) flat.narrow(0, one.leaf->place.slice_offset, one.leaf->place.length).copy_(values);
    }
  }
  return flat;
}

std::set<std::string> names_in(const std::vector<LeafStates>& all, size_t bucket) {
  std::set<std::string> names;
  for (const LeafStates& one : all) {
    if (one.leaf->bucket != bucket || one.steps == 0) continue;
    for (const auto& [name, values] : one.tensors) names.insert(name);
  }
  return names;
}

// The number of steps that a state dict gives for a leaf; 0 where it gives "step" 0 and nothing else. Throws UsageError
// for a part that is missing. `has`, `step`: called with a key.
template <class Has, class Step>
int64_t given_steps(const OptimizerStates& states, const LeafStates& one, const Has& has, const Step& step) {
  const bool counts = OptimizerStates::counts_steps(*one.kind);
  const std::string step_key = key_of(one, kStep);
  const int64_t steps = has(step_key) ? step(step_key) : counts ? -1 : 1;
  require(steps >= 0, states.call(), ": expected ", step_key, ", a number of steps, found ",
          has(step_key) ? cat(steps) : "none", "; a parameter that had no step has 0 there, and nothing else");
  require(counts || steps == 0 || !has(step_key), states.call(), ": expected no ", step_key, " but 0, which ",
          optimizers::client_name(states.optimizer()), " does not count, found ", steps);
  for (const std::string& name : one.kind->names) {
    require(has(key_of(one, name)) == (steps > 0), states.call(), ": expected ", steps > 0 ? "" : "no ",
            key_of(one, name), steps > 0 ? ", found none" : ", as its steps are 0, found one",
            steps > 0 && !counts ? cat("; a parameter that had no step has ", step_key, ", 0, instead") : "");
  }
  return steps;
}

// Throws UsageError for a name that the optimizer has no place for.
template <class Named>
void require_known(const OptimizerStates& states, const Named& given) {
  std::set<std::string> known;
  for (const LeafStates& one : states.leaves()) {
    if (!one.kind->prototype) continue;
    known.insert(key_of(one, kStep));
    for (const std::string& name : one.kind->names) known.insert(key_of(one, name));
  }
  for (const auto& [key, value] : given) {
    require(known.contains(key), states.call(), ": expected states of ", optimizers::client_name(states.optimizer()),
            " over its parameters alone, found ", key,
            "; was the optimizer that saved them another one, with other options, or over other parameters?");
  }
}

// Steps of each leaf in a full state dict, in their order. Throws UsageError for what does not fit.
std::vector<int64_t> require_states(const OptimizerStates& states, const ValuesByName& given) {
  std::vector<int64_t> steps;
  const auto has = [&](const std::string& key) { return given.contains(key); };
  const auto step = [&](const std::string& key) { return whole_number(states.call(), key, given.at(key)); };
  for (const LeafStates& one : states.leaves()) {
    const int64_t own = steps.emplace_back(one.kind->prototype ? given_steps(states, one, has, step) : 0);
    for (size_t i = 0; own > 0 && i < one.kind->names.size(); ++i) {
      const std::string key = key_of(one, one.kind->names[i]);
      require_shape(states.call(), key, given.at(key), sizes_of(states, one));
    }
  }
  require_known(states, given);
  return steps;
}

// All ranks write the same.
int64_t steps_of_parts(const char* call, const std::string& key, const std::vector<const ShardedTensor*>& parts) {
  const int64_t steps = whole_number(call, key, parts.front()->values);
  for (const ShardedTensor* part : parts) {
    const int64_t other = whole_number(call, key, part->values);
    require(other == steps, call, ": ", key, ": expected one number in the parts of all ranks, found ", steps, " and ",
            other, "; give it parts that were taken after the same step");
  }
  return steps;
}

// Rank 0's, of each leaf.
std::vector<int64_t> steps_of_first_rank(const Givers& givers, std::vector<int64_t> steps, size_t leaves) {
  steps.resize(leaves);
  const at::Tensor numbers = at::tensor(at::IntArrayRef(steps), at::kLong).to(givers.device);
  if (leaves > 0) givers.ranks.broadcast(numbers, 0, "steps of optimizer states").wait();
  const at::Tensor here = numbers.to(at::kCPU);
  const auto* const first = here.const_data_ptr<int64_t>();
  return {first, first + leaves};
}

}  // namespace

StateDict full_optimizer_state(const OptimizerStates& states, const FullStateOptions& options) {
  const at::NoGradGuard no_grad;
  const engine::ModelState& model = states.model().state();
  const std::vector<LeafStates> all = states.read();
  const bool keeps = !options.rank0_only || states.model().ranks().world->rank() == 0;
  ValuesByName wholes;  // or this rank's parts, over a tensor axis
  for (size_t b = 0; b < model.buckets.size(); ++b) {
    for (const std::string& name : names_in(all, b)) {
      const at::Tensor flat =
          engine::joined_slices(model, b, slice_with(states, all, b, name), cat(name, " of bucket ", b));
      for (const Segment& segment : model.buckets[b].layout().segments) {
        const zero::Parameter& parameter = model.parameters[static_cast<size_t>(segment.parameter)];
        if (!keeps && !parameter.part) continue;
        wholes[cat("state.", parameter.name, ".", name)] =
            zero::view_of(flat, segment, parameter.tensor).to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
      }
    }
  }
  StateDict result;
  for (const LeafStates& one : all) {
    if (!one.kind->prototype) continue;
    const zero::Parameter& parameter = parameter_of(states, one);
    for (size_t i = 0; one.steps > 0 && i < one.tensors.size(); ++i) {
      if (!keeps && !parameter.part) continue;
      const std::string key = key_of(one, one.tensors[i].first);
      at::Tensor whole = engine::joined_over_axis(model, parameter, wholes.at(key));
      if (keeps) result.emplace_back(key, std::move(whole));
    }
    if (!keeps) continue;
    if (one.steps == 0 || OptimizerStates::counts_steps(*one.kind))
      result.emplace_back(key_of(one, kStep), steps_tensor(one.steps));
  }
  return result;
}

void load_full_optimizer_state(const OptimizerStates& states, const StateDict& state, bool broadcast) {
  const at::NoGradGuard no_grad;
  const c10::Device device = states.model().ranks().device;
  const Givers givers{states.call(), *states.model().ranks().world, device, broadcast};
  ValuesByName given;
  std::vector<LeafStates> all = states.leaves();
  std::vector<int64_t> steps;
  givers.check("the optimizer", [&] {
    given = by_name(givers.call, state);
    steps = require_states(states, given);
  });
  if (broadcast) steps = steps_of_first_rank(givers, std::move(steps), all.size());
  for (size_t l = 0; l < all.size(); ++l) {
    LeafStates& one = all[l];
    one.steps = steps[l];
    const at::TensorOptions options = one.leaf->tensor.options().requires_grad(false);
    for (size_t i = 0; one.steps > 0 && i < one.kind->names.size(); ++i) {
      const std::string key = key_of(one, one.kind->names[i]);
      at::Tensor whole = givers.reads() ? given.at(key).to(options.device(device)).contiguous()
                                        : at::empty(sizes_of(states, one), options.device(device));
      if (broadcast) givers.ranks.broadcast(whole, 0, key).wait();
      const OwnPart own = own_part_of(states, one, key, one.leaf->tensor);
      one.tensors.emplace_back(one.kind->names[i], elements_of(own, whole).to(one.leaf->tensor.device()));
    }
    states.give(one);
    one.tensors.clear();  // it has copies; these are views of full ones
  }
}

std::vector<ShardedTensor> sharded_optimizer_state(const OptimizerStates& states) {
  std::vector<ShardedTensor> result;
  for (const LeafStates& one : states.read()) {
    if (!one.kind->prototype) continue;
    for (const auto& [name, values] : one.tensors) {
      if (one.steps == 0) break;
      for (const OwnPart& run : runs_of(own_part_of(states, one, key_of(one, name), values))) {
        result.push_back({.name = run.name,
                          .sizes = run.sizes,
                          .offset = run.offset,
                          .values = run.values.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true)});
      }
    }
    if (one.steps > 0 && !OptimizerStates::counts_steps(*one.kind)) continue;
    result.push_back(
        {.name = key_of(one, kStep), .sizes = {}, .offset = 0, .values = steps_tensor(one.steps).view({1})});
  }
  return result;
}

void load_sharded_optimizer_state(const OptimizerStates& states, const std::vector<ShardedTensor>& parts) {
  const at::NoGradGuard no_grad;
  const GivenParts given = given_parts(parts);
  const auto has = [&](const std::string& key) { return given.contains(key); };
  const auto step = [&](const std::string& key) { return steps_of_parts(states.call(), key, given.at(key)); };
  std::vector<LeafStates> all = states.leaves();
  for (LeafStates& one : all) {
    if (!one.kind->prototype) continue;
    one.steps = given_steps(states, one, has, step);
    for (const std::string& name : one.kind->names) {
      if (one.steps == 0) break;
      one.tensors.emplace_back(name, at::zeros_like(one.leaf->tensor.detach()));
      for (const OwnPart& run : runs_of(own_part_of(states, one, key_of(one, name), one.tensors.back().second))) {
        require_covered(states.call(), run, given);
        copy_parts(run, given);
      }
    }
  }
  require_known(states, given);
  for (const LeafStates& one : all) states.give(one);
}

}  // namespace ds::loops
