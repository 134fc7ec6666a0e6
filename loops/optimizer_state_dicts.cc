// An optimizer's states by name: "state.PARAMETER.KEY", and "state.PARAMETER.step", as torch's flattened ones.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>

#include <exception>
#include <map>
#include <set>
#include <sstream>
#include <utility>

#include "core/check.h"
#include "core/tensor_check.h"
#include "engine/agreement/shared_failure.h"
#include "engine/agreement/shared_text.h"
#include "engine/state/whole_state.h"
#include "loops/optimizer_states.h"
#include "loops/own_parts.h"

namespace ds::loops {
namespace {

constexpr const char* kStep = "step";

std::string key_of(const LeafStates& one, const std::string& name) { return cat("state.", one.leaf->name, ".", name); }

at::Tensor steps_tensor(int64_t steps) { return at::full({}, steps, at::kLong); }

const std::vector<int64_t>& sizes_of(const OptimizerStates& states, const LeafStates& one) {
  return states.model().state().infos[one.leaf->parameter].sizes;
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
    if (one.leaf->bucket != bucket) continue;
    for (const auto& [name, values] : one.tensors) names.insert(name);
  }
  return names;
}

using Given = std::map<std::string, at::Tensor>;

// Steps of each leaf in a full state dict, 0 for one that it has nothing of. Throws UsageError for what does not fit.
std::map<std::string, int64_t> require_states(const OptimizerStates& states, const Given& given) {
  std::map<std::string, int64_t> steps;
  size_t known = 0;
  for (const LeafStates& one : states.leaves()) {
    if (!one.kind->prototype) continue;
    const bool counts = OptimizerStates::counts_steps(*one.kind);
    const bool present = given.contains(key_of(one, counts ? kStep : one.kind->names.front()));
    for (const std::string& name : one.kind->names) {
      const auto found = given.find(key_of(one, name));
      require((found != given.end()) == present, states.call(), ": expected ", present ? "" : "no ", key_of(one, name),
              present ? ", found none" : " without the others of this parameter, found one");
      if (!present) continue;
      require(found->second.sizes() == sizes_of(states, one), states.call(), ": ", key_of(one, name),
              ": expected a tensor of shape ", at::IntArrayRef(sizes_of(states, one)), ", found ",
              describe(found->second));
      ++known;
    }
    known += present && counts ? 1 : 0;
    steps[one.leaf->name] = !present ? 0 : counts ? given.at(key_of(one, kStep)).item<int64_t>() : 1;
  }
  require(known == given.size(), states.call(), ": expected states of ", optimizers::client_name(states.optimizer()),
          " alone, which are ", known, " here, found ", given.size(),
          "; was the optimizer that saved them another one, or over other parameters?");
  return steps;
}

std::string text_of(const std::map<std::string, int64_t>& steps) {
  std::string text;
  for (const auto& [name, count] : steps) text += cat(name, '\t', count, '\n');
  return text;
}

std::map<std::string, int64_t> steps_of(const std::string& text) {
  std::map<std::string, int64_t> steps;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t tab = line.find('\t');
    steps[line.substr(0, tab)] = std::stoll(line.substr(tab + 1));
  }
  return steps;
}

}  // namespace

StateDict full_optimizer_state(const OptimizerStates& states, const FullStateOptions& options) {
  const at::NoGradGuard no_grad;
  const engine::ModelState& model = states.model().state();
  const std::vector<LeafStates> all = states.read();
  const bool keeps = !options.rank0_only || states.model().ranks().all->rank() == 0;
  Given wholes;
  for (size_t b = 0; b < model.buckets.size(); ++b) {
    for (const std::string& name : names_in(all, b)) {
      const at::Tensor flat =
          engine::joined_slices(model, b, slice_with(states, all, b, name), cat(name, " of bucket ", b));
      if (!keeps) continue;
      for (const Segment& segment : model.buckets[b].layout().segments) {
        const zero::Parameter& parameter = model.parameters[static_cast<size_t>(segment.parameter)];
        wholes[cat("state.", parameter.name, ".", name)] =
            zero::view_of(flat, segment, parameter.tensor).to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
      }
    }
  }
  StateDict result;
  if (!keeps) return result;
  for (const LeafStates& one : all) {
    if (one.steps == 0) continue;
    for (const auto& [name, values] : one.tensors) result.emplace_back(key_of(one, name), wholes.at(key_of(one, name)));
    if (OptimizerStates::counts_steps(*one.kind)) result.emplace_back(key_of(one, kStep), steps_tensor(one.steps));
  }
  return result;
}

void load_full_optimizer_state(const OptimizerStates& states, const StateDict& state, bool broadcast) {
  const at::NoGradGuard no_grad;
  comm::Communicator& ranks = *states.model().ranks().all;
  const c10::Device device = states.model().ranks().device;
  const bool reads = !broadcast || ranks.rank() == 0;
  Given given;
  std::map<std::string, int64_t> steps;
  std::exception_ptr failure;
  try {
    if (reads) given.insert(state.begin(), state.end());
    if (reads) steps = require_states(states, given);
  } catch (...) {
    failure = std::current_exception();
  }
  if (failure && !broadcast) std::rethrow_exception(failure);
  if (broadcast) {
    const int failed = engine::failed_rank(failure, device, ranks);
    require(failed < 0, states.call(), ": the state of rank ", failed,
            " does not fit the optimizer, its message says why");
    steps = steps_of(engine::text_of_first_rank(text_of(steps), device, ranks));
  }
  for (LeafStates& one : states.leaves()) {
    one.steps = steps[one.leaf->name];
    const at::TensorOptions options = one.leaf->tensor.options().requires_grad(false);
    for (size_t i = 0; one.steps > 0 && i < one.kind->names.size(); ++i) {
      const std::string key = key_of(one, one.kind->names[i]);
      at::Tensor whole = reads ? given.at(key).to(options.device(device)).contiguous()
                               : at::empty(sizes_of(states, one), options.device(device));
      if (broadcast) ranks.broadcast(whole, 0, key).wait();
      one.tensors.emplace_back(one.kind->names[i],
                               whole.view({-1})
                                   .narrow(0, one.leaf->place.parameter_offset, one.leaf->tensor.numel())
                                   .to(one.leaf->tensor.device()));
    }
    states.give(one);
  }
}

std::vector<ShardedTensor> sharded_optimizer_state(const OptimizerStates& states) {
  std::vector<ShardedTensor> result;
  for (const LeafStates& one : states.read()) {
    if (one.steps == 0) continue;
    for (const auto& [name, values] : one.tensors) {
      result.push_back({.name = key_of(one, name),
                        .sizes = sizes_of(states, one),
                        .offset = one.leaf->place.parameter_offset,
                        .values = values.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true)});
    }
    if (!OptimizerStates::counts_steps(*one.kind)) continue;
    result.push_back(
        {.name = key_of(one, kStep), .sizes = {}, .offset = 0, .values = steps_tensor(one.steps).view({1})});
  }
  return result;
}

void load_sharded_optimizer_state(const OptimizerStates& states, const std::vector<ShardedTensor>& parts) {
  const at::NoGradGuard no_grad;
  const GivenParts given = given_parts(parts);
  std::vector<LeafStates> all = states.leaves();
  for (LeafStates& one : all) {
    if (!one.kind->prototype) continue;
    const bool counts = OptimizerStates::counts_steps(*one.kind);
    const auto first = given.find(key_of(one, counts ? kStep : one.kind->names.front()));
    if (first == given.end()) continue;
    one.steps = counts ? first->second.front()->values.item<int64_t>() : 1;
    for (const std::string& name : one.kind->names) {
      one.tensors.emplace_back(name, at::zeros_like(one.leaf->tensor.detach()));
      const OwnPart own = {key_of(one, name), sizes_of(states, one), one.leaf->place.parameter_offset,
                           one.tensors.back().second};
      require_covered(states.call(), own, given);
      copy_parts(own, given);
    }
  }
  for (const LeafStates& one : all) states.give(one);
}

}  // namespace ds::loops
