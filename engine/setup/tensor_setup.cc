#include "engine/setup/tensor_setup.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <string>
#include <utility>

#include "config/split/rules_from_names.h"
#include "config/split/split_rules.h"
#include "core/check.h"
#include "core/log.h"
#include "model/state/same_on_all_ranks.h"
#include "parallel/axis/axis.h"
#include "parallel/split_module.h"

namespace ds::engine {
namespace {

using parallel::ParameterSplit;
using parallel::SplitRule;

// The program's, and what modules declare themselves; without any of the program's also those of the config.
SplitRules rules_of(const InitializeOptions& options, const config::DsConfig& config) {
  SplitRules result{.rules = options.split, .warnings = {}};
  for (SplitRule& declared : parallel::declared_splits(*options.model)) result.rules.push_back(std::move(declared));
  if (options.split.empty()) {
    std::vector<parallel::NamedShape> shapes;
    for (const auto& item : options.model->named_parameters()) {
      shapes.push_back({.name = item.key(), .sizes = item.value().sizes().vec()});
    }
    SplitRules named = split_rules(config.tensor_parallel, shapes);
    for (SplitRule& rule : named.rules) result.rules.push_back(std::move(rule));
    result.warnings = std::move(named.warnings);
  }
  require<ConfigError>(!result.rules.empty(), "tensor_parallel.autotp_size: ", config.tensor_parallel.size(),
                       ": expected names of layers that are known, or rules that say what is split; found a model in ",
                       "which nothing is. Name its layers in tensor_parallel.partition_config, or give rules with ",
                       "InitializeOptions::split (docs/tensor_parallel.md)");
  return result;
}

// Lines "what<TAB>value" of all that decides what is split, and where values come from: ranks that differ would wait
// for each other.
std::string split_text(const InitializeOptions& options, const config::DsConfig& config,
                       const std::vector<SplitRule>& rules) {
  std::string text = config_lines(config);
  text += cat(".weights\t", options.weights.empty() ? "none" : "given", '\n');
  text += cat(".init\t", options.init ? "given" : "none", '\n');
  for (size_t i = 0; i < rules.size(); ++i) {
    const SplitRule& rule = rules[i];
    text += cat("rule ", i, " of .split\t", rule.pattern, ", style ", static_cast<int>(rule.style), ", blocks ",
                at::IntArrayRef(rule.blocks), ", grain ", rule.grain, ", dim ", rule.dim.value_or(-1), ", join_output ",
                rule.join_output, '\n');
  }
  for (const auto& item : options.model->named_parameters()) {
    text += cat("parameter ", item.key(), '\t', item.value().scalar_type(), ' ', item.value().sizes(), '\n');
  }
  return text;
}

// Where the parts of a module's parameters come from.
class Values {
 public:
  Values(const Ranks& ranks, const InitializeOptions& options) : ranks_(ranks), options_(options) {
    // Leaves, which are other ones on each rank, are no parameters that it may slice.
    if (options.init) options.init->end();
  }

  // Of what stays whole.
  void share_wholes(const parallel::SplitPlan& plan) {
    const auto parameters = options_.model->named_parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!plan[i].is_split() && options_.weights.empty()) share(parameters[i].value().detach());
    }
    for (const at::Tensor& buffer : options_.model->buffers()) share(buffer);
  }

  at::Tensor part(const std::string& name, const at::Tensor& parameter, const TensorPart& part) {
    const at::NoGradGuard no_grad;
    const bool from_file = !options_.weights.empty();
    require(from_file || !parameter.is_meta(), "initialize: ", name, " is on the meta device and has no values; pass ",
            ".weights = \"model.safetensors\"");
    const auto like = parameter.options().device(ranks_.device).requires_grad(false);
    if (from_file) {
      forget(parameter);
      return at::empty(part.sizes(), like);
    }
    // In memory of its own: what zero::Init has sliced is whole while operators read it.
    const at::Tensor whole =
        options_.init ? at::empty(parameter.sizes(), like).copy_(parameter.detach()) : parameter.detach().contiguous();
    forget(parameter);
    broadcast(whole);
    return slice_of(whole, part).to(ranks_.device).clone(at::MemoryFormat::Contiguous);
  }

 private:
  void share(const at::Tensor& tensor) {
    const at::NoGradGuard no_grad;
    if (!tensor.defined() || tensor.is_meta() || tensor.numel() == 0) return;
    if (tensor.storage().nbytes() == 0) return;  // sliced by zero::Init, which has rank 0's values
    const at::Tensor values = tensor.to(ranks_.device).contiguous();
    broadcast(values);
    if (!values.is_alias_of(tensor)) at::Tensor(tensor).copy_(values);
  }

  // From rank 0 to its axis; data-parallel ranks get it with the buckets.
  void broadcast(const at::Tensor& values) {
    if (ranks_.part->rank() == 0) ranks_.tensor->broadcast(values, 0, "initial parameters").wait();
  }

  void forget(const at::Tensor& parameter) {
    if (!options_.init) return;
    options_.init->rethrow();
    options_.init->forget(parameter);
  }

  const Ranks& ranks_;
  const InitializeOptions& options_;
};

std::string cut_text(const ParameterSplit& split) {
  if (!split.is_split()) return "whole on every rank";
  std::string text = cat("split along dimension ", split.dim);
  if (split.blocks.size() > 1) text += cat(" in ", split.blocks.size(), " blocks");
  if (split.grain > 1) text += cat(", in multiples of ", split.grain);
  return text;
}

}  // namespace

void add_splits(const TensorParts& parts, const ModelParameters& parameters, PlanFacts& facts) {
  for (const ParameterSplit& split : parts.split.plan) {
    SplitRow row{.names = without_numbers(split.name), .what = cut_text(split), .reason = split.reason};
    const bool known = std::any_of(facts.splits.begin(), facts.splits.end(), [&](const SplitRow& other) {
      return other.names == row.names && other.what == row.what;
    });
    if (!known) facts.splits.push_back(std::move(row));
  }
  facts.split_parameters = 0;
  for (const zero::Parameter& parameter : parameters.trainable) {
    if (parameter.part) *facts.split_parameters += parameter.tensor.numel();
  }
}

std::unique_ptr<TensorParts> split_over_tensor_axis(const Ranks& ranks, const InitializeOptions& options,
                                                    const config::DsConfig& config) {
  if (!ranks.tensor) return nullptr;
  const bool sequences = config.tensor_parallel.sequence_parallel;
  require<ConfigError>(!sequences || !options.init,
                       "tensor_parallel.sequence_parallel: true excludes a model that was ",
                       "built under zero::Init; build it as it is, or on the meta device with .weights");
  torch::nn::Module& module = *options.model;
  const SplitRules split = rules_of(options, config);
  const auto samples = options.training_data ? std::optional(options.training_data.size()) : std::nullopt;
  require_same_on_all_ranks({}, split_text(options, config, split.rules),
                            {.samples = samples, .has_schedule = options.lr_scheduler || options.torch_scheduler},
                            ranks.device, *ranks.world);
  parallel::SplitPlan plan = parallel::plan_module(module, split.rules, ranks.tensor->size());
  if (ranks.world->rank() == 0) {
    for (const std::string& warning : split.warnings) log::warning(warning);
  }
  auto parts = std::make_unique<TensorParts>();
  parts->ranks = ranks.tensor;
  parts->world_ranks = ranks.mesh->layout().group_of(ranks.world->rank(), {comm::MeshAxis::kTensor});
  const auto axis = parallel::make_axis(ranks.tensor);
  axis->join_ranks_of(ranks.world.get(), parts->world_ranks);
  parts->split.axis = axis;  // now: what fails below leaves it in parameters that are split already
  axis->verify(config.tensor_parallel.verify);
  axis->overlap(config.tensor_parallel.tp_overlap_comm);
  axis->cut_sequences(sequences);
  parts->sums_wholes = sequences;
  if (config.activation_checkpointing.partition_activations) parts->regions.emplace(ranks.tensor);
  axis->tell_joins(false);  // the engine does, after the first step
  axis->watch_data([parts = parts.get()](const at::Tensor& plain) { parts->note_data(plain); });
  Values values(ranks, options);
  values.share_wholes(plan);
  parts->split = parallel::split_module(
      module, axis, std::move(plan),
      [&](const std::string& name, const at::Tensor& parameter, const Placement& placement) {
        const TensorPart part(parameter.sizes().vec(), *placement.cut, axis->rank(), axis->size());
        return values.part(name, parameter, part);
      });
  for (const auto& item : module.named_parameters()) {
    if (is_split(item.value())) parts->parameters.push_back({item.key(), item.value(), leaf_of(item.value())});
  }
  return parts;
}

}  // namespace ds::engine
