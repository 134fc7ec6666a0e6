#include "engine/setup/tensor_setup.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <exception>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "comm/agreement.h"
#include "config/split/rules_from_names.h"
#include "config/split/split_rules.h"
#include "core/check.h"
#include "core/log.h"
#include "core/text_lines.h"
#include "dsengine/sequence_attention.h"
#include "model/state/same_on_all_ranks.h"
#include "model/state/weight_average.h"
#include "parallel/axis/axis.h"
#include "parallel/split_module.h"
#include "zero/parameter.h"

namespace ds::engine {
namespace {

using parallel::NamedShape;
using parallel::ParameterSplit;
using parallel::SplitRule;

// The names and sizes of the whole model's parameters, in the order of the stages' ranks, each name once: rules are
// meant for them, whichever stage has the layer. Collective over the ranks of the pipeline.
std::vector<NamedShape> shapes_of_model(const torch::nn::Module& module, const Ranks& ranks) {
  std::string own;
  for (const auto& item : module.named_parameters()) {
    own += item.key();
    for (const int64_t size : item.value().sizes()) own += cat('\t', size);
    own += '\n';
  }
  std::vector<std::string> texts = {own};
  if (ranks.mesh->size(comm::MeshAxis::kPipe) > 1) {
    comm::Communicator& pipe = *ranks.mesh->group(comm::MeshAxis::kPipe);
    texts = comm::texts_of_ranks(own, ranks.device, pipe, "parameters of the stages");
  }
  std::vector<NamedShape> shapes;
  std::set<std::string> names;
  for (const std::string& text : texts) {
    for (const std::string& line : text_lines(text)) {
      const size_t end = std::min(line.find('\t'), line.size());
      NamedShape shape{.name = line.substr(0, end), .sizes = {}};
      for (size_t at = end; at < line.size(); at = std::min(line.find('\t', at + 1), line.size())) {
        shape.sizes.push_back(std::stoll(line.substr(at + 1)));
      }
      if (names.insert(shape.name).second) shapes.push_back(std::move(shape));
    }
  }
  return shapes;
}

// Returns those of `shapes`, the whole model's parameters, that this rank's stages lack.
std::vector<NamedShape> shapes_elsewhere(std::vector<NamedShape> shapes, const torch::nn::Module& module) {
  const auto own = module.named_parameters();
  std::erase_if(shapes, [&](const NamedShape& shape) { return own.contains(shape.name); });
  return shapes;
}

// Returns the program's rules, and those that modules declare themselves; without any of the program's also those of
// the config, for `shapes`, the whole model's.
SplitRules rules_of(const InitializeOptions& options, const config::DsConfig& config,
                    const std::vector<NamedShape>& shapes) {
  SplitRules result{.rules = options.split, .warnings = {}};
  for (SplitRule& declared : parallel::declared_splits(*options.model)) result.rules.push_back(std::move(declared));
  if (options.split.empty()) {
    SplitRules named = split_rules(config.tensor_parallel, shapes);
    for (SplitRule& rule : named.rules) result.rules.push_back(std::move(rule));
    result.warnings = std::move(named.warnings);
  }
  return result;
}

std::string rule_lines(const std::vector<SplitRule>& rules) {
  std::string text;
  for (size_t i = 0; i < rules.size(); ++i) {
    const SplitRule& rule = rules[i];
    text += cat("rule ", i, " of .split\t", rule.pattern, ", style ", static_cast<int>(rule.style), ", blocks ",
                at::IntArrayRef(rule.blocks), ", grain ", rule.grain, ", dim ", rule.dim.value_or(-1), ", join_output ",
                rule.join_output, '\n');
  }
  return text;
}

// Lines "what<TAB>value" of all that decides what is split, and where values come from: ranks that differ would wait
// for each other.
std::string split_text(const InitializeOptions& options, const config::DsConfig& config,
                       const std::vector<SplitRule>& rules, const StartFiles& files) {
  std::string text = config_lines(config) + files.settings();
  text += cat(".init\t", options.init ? "given" : "none", '\n');
  text += ema_lines(options.ema) + rule_lines(rules);
  for (const auto& item : options.model->named_parameters()) {
    text += cat("parameter ", item.key(), '\t', item.value().scalar_type(), ' ', item.value().sizes(), '\n');
  }
  return text;
}

// Where the parts of a module's parameters come from.
class Values {
 public:
  Values(const Ranks& ranks, const InitializeOptions& options, StartFiles& files)
      : ranks_(ranks), options_(options), files_(files) {
    // Leaves, which are other ones on each rank, are no parameters that it may slice.
    if (options.init) options.init->end();
  }

  // Of what stays whole.
  void share_wholes(const parallel::SplitPlan& plan) {
    const auto parameters = options_.model->named_parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!plan[i].is_split() && !files_.give(parameters[i].key())) share(parameters[i].key(), parameters[i].value());
    }
    for (const auto& item : options_.model->named_buffers()) share(item.key(), item.value());
  }

  at::Tensor part(const std::string& name, const at::Tensor& parameter, const TensorPart& part) {
    const at::NoGradGuard no_grad;
    if (files_.give(name)) {
      forget(parameter);
      return at::empty(part.sizes(), like(parameter));
    }
    require(files_.given() || !parameter.is_meta(), "initialize: ", name,
            " is on the meta device and has no values; pass .weights = \"model.safetensors\"");
    // In memory of its own: what zero::Init has sliced is whole while operators read it.
    at::Tensor whole;
    if (makes(name)) {
      whole = made(name, parameter);
    } else {
      whole = options_.init ? at::empty(parameter.sizes(), like(parameter)).copy_(parameter.detach())
                            : parameter.detach().contiguous();
      forget(parameter);
      broadcast(whole);
    }
    return slice_of(whole, part).to(ranks_.device).clone(at::MemoryFormat::Contiguous);
  }

 private:
  // Whether the program makes values of the tensor that the files lack.
  bool makes(const std::string& name) const { return !files_.is_settled(name) && !files_.give(name); }

  at::TensorOptions like(const at::Tensor& tensor) const {
    return tensor.options().device(ranks_.device).requires_grad(false);
  }

  // The full tensor, in memory of its own, with what the program makes and the rows that the files have.
  at::Tensor made(const std::string& name, const at::Tensor& tensor) {
    const at::NoGradGuard no_grad;
    const at::Tensor whole = at::empty(tensor.sizes(), like(tensor));
    if (const at::Tensor values = files_.values(name, tensor); values.defined()) whole.copy_(values);
    files_.settle(name);
    forget(tensor);
    broadcast(whole);
    return whole;
  }

  void share(const std::string& name, const at::Tensor& whole) {
    const at::NoGradGuard no_grad;
    if (!whole.defined() || whole.numel() == 0) return;
    if (whole.is_meta()) {
      if (makes(name)) zero::point_to(whole, made(name, whole));
      return;
    }
    const at::Tensor tensor = whole.detach();
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
  StartFiles& files_;
};

// Warns of the layers of a pipeline's rank of which nothing is split: the ranks of its axis do the same work. What they
// cut of a sequence they share in any case. Rules that layers declare are known to their own stage alone, so that its
// first rank tells.
void warn_of_whole_layers(const Ranks& ranks, const config::DsConfig& config, const parallel::SplitPlan& own) {
  const int pipe = ranks.mesh->size(comm::MeshAxis::kPipe);
  if (pipe == 1 || config.tensor_parallel.sequence_parallel) return;
  if (ranks.part->rank() > 0 || ranks.tensor->rank() > 0) return;
  if (std::any_of(own.begin(), own.end(), [](const ParameterSplit& one) { return one.is_split(); })) return;
  const auto matrix = std::find_if(own.begin(), own.end(), [](const auto& one) { return one.sizes.size() > 1; });
  if (matrix == own.end()) return;
  int64_t elements = 0;
  for (const ParameterSplit& one : own) elements += c10::multiply_integers(one.sizes);
  log::warning("tensor_parallel: of the layers of pipeline rank ", ranks.mesh->group(comm::MeshAxis::kPipe)->rank(),
               " of ", pipe, " nothing is split: ", own.size(), " parameters, ", elements, " elements, as ",
               matrix->name, " (", matrix->reason, "). Each of the ", ranks.tensor->size(), " ranks of its axis ",
               "computes and keeps all of them; name its layers in .split or tensor_parallel.partition_config, or ",
               "give it others by pipeline.partition");
}

// The plans for the layers of this rank, and for those that other stages have.
struct PlannedSplits {
  parallel::SplitPlan own, elsewhere;
};

// Plans how layers are split. Throws on all ranks where one of them cannot plan. Collective over all ranks.
PlannedSplits plan_splits_of(const Ranks& ranks, const InitializeOptions& options, const config::DsConfig& config,
                             const StartFiles& files) {
  const torch::nn::Module& module = *options.model;
  // Stages have other parameters, but the program's rules are one list for all.
  if (ranks.mesh->size(comm::MeshAxis::kPipe) > 1) {
    require_same_on_all_ranks({}, config_lines(config) + rule_lines(options.split), {}, ranks.device, *ranks.world);
  }
  std::vector<NamedShape> shapes = shapes_of_model(module, ranks);
  SplitRules split;
  parallel::SplitPlan plan;
  std::exception_ptr failure;
  try {
    split = rules_of(options, config, shapes);
    plan =
        parallel::plan_module(module, split.rules, ranks.tensor->size(), shapes_elsewhere(std::move(shapes), module));
  } catch (...) {
    failure = std::current_exception();
  }
  const auto failed = comm::failure_of_ranks(failure, ranks.device, *ranks.world);
  require(!failed, "initialize: rank ", failed ? failed->rank : 0,
          " could not split its layers over the tensor axis: ", failed ? failed->message : "");
  const auto samples = options.training_data ? std::optional(options.training_data.size()) : std::nullopt;
  require_same_on_all_ranks({}, split_text(options, config, split.rules, files),
                            {.samples = samples, .has_schedule = options.lr_scheduler || options.torch_scheduler},
                            ranks.device, ranks.layer_ranks());
  // With sequences that are cut the ranks share the work in any case. Rules that layers declare are known to their
  // own stage alone.
  const bool shares = config.tensor_parallel.sequence_parallel ||
                      std::any_of(plan.begin(), plan.end(), [](const auto& one) { return one.is_split(); });
  require<ConfigError>(largest_of_ranks(shares ? 1 : 0, ranks.device, *ranks.world, "split layers") == 1,
                       lazy([&] { return nothing_is_split(config.tensor_parallel.size()); }));
  if (ranks.world->rank() == 0) {
    for (const std::string& warning : split.warnings) log::warning(warning);
  }
  const auto others = plan.begin() + static_cast<std::ptrdiff_t>(module.named_parameters().size());
  PlannedSplits planned{.own = {plan.begin(), others}, .elsewhere = {others, plan.end()}};
  warn_of_whole_layers(ranks, config, planned.own);
  return planned;
}

std::string cut_text(const ParameterSplit& split) {
  if (!split.is_split()) return "whole on every rank";
  std::string text = cat("split along dimension ", split.dim);
  if (split.blocks.size() > 1) text += cat(" in ", split.blocks.size(), " blocks");
  if (split.grain > 1) text += cat(", in multiples of ", split.grain);
  return text;
}

// Throws ConfigError for features that exclude an unmodified model on pieces of its batches.
void require_unmodified_fits(const InitializeOptions& options, const config::DsConfig& config) {
  const auto require_off = [&](bool off, const char* what, const char* instead) {
    require<ConfigError>(off, "sequence_parallel_size: ", config.sequence_ranks(), " excludes ", what, " where the ",
                         "engine cuts the batches of an unmodified model; ", instead,
                         ", or let the program cut its sequences (.cuts_sequences)");
  };
  require_off(!options.init, "zero::Init", "build the model as it is");
  const auto parameters = options.model->parameters();
  require_off(std::none_of(parameters.begin(), parameters.end(), [](const auto& one) { return one.is_meta(); }),
              "a model on the meta device", "build it on the CPU");
  require_off(!options.optimizer && !options.make_optimizer, "an optimizer of the program",
              "use the optimizer section of the config");
  require_off(!config.fp8.enabled, "fp8", "turn it off");
  require_off(!config.sparse_gradients, "sparse_gradients", "turn it off");
  require_off(config.text.value("compression_training", nlohmann::ordered_json::object()).empty(),
              "compression_training", "remove it");
}

}  // namespace

void add_splits(const TensorParts& parts, const ModelParameters& parameters, PlanFacts& facts) {
  if (parts.cuts_batches) return;
  parallel::SplitPlan plan = parts.split.plan;
  plan.insert(plan.end(), parts.elsewhere.begin(), parts.elsewhere.end());
  for (const ParameterSplit& split : plan) {
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
                                                    const config::DsConfig& config, StartFiles& files) {
  if (!ranks.tensor) return nullptr;
  const bool sequences = config.tensor_parallel.sequence_parallel;
  require<ConfigError>(!sequences || !options.init,
                       "tensor_parallel.sequence_parallel: true excludes a model that was ",
                       "built under zero::Init; build it as it is, or on the meta device with .weights");
  torch::nn::Module& module = *options.model;
  PlannedSplits planned = plan_splits_of(ranks, options, config, files);
  auto parts = std::make_unique<TensorParts>();
  parts->ranks = ranks.tensor;
  parts->elsewhere = std::move(planned.elsewhere);
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
  files.open(module, ranks);
  Values values(ranks, options, files);
  values.share_wholes(planned.own);
  parts->split = parallel::split_module(
      module, axis, std::move(planned.own),
      [&](const std::string& name, const at::Tensor& parameter, const Placement& placement) {
        const TensorPart part(parameter.sizes().vec(), *placement.cut, axis->rank(), axis->size());
        return values.part(name, parameter, part);
      });
  for (const auto& item : module.named_parameters()) {
    if (is_split(item.value())) parts->parameters.push_back({item.key(), item.value(), leaf_of(item.value())});
  }
  return parts;
}

std::unique_ptr<TensorParts> cut_over_sequence_axis(const Ranks& ranks, const InitializeOptions& options,
                                                    const config::DsConfig& config, StartFiles& files) {
  if (!ranks.sequence || options.cuts_sequences) return nullptr;
  require_unmodified_fits(options, config);
  torch::nn::Module& module = *options.model;
  auto parts = std::make_unique<TensorParts>();
  parts->ranks = ranks.sequence;
  parts->cuts_batches = true;
  parts->world_ranks = ranks.mesh->layout().group_of(ranks.world->rank(), {comm::MeshAxis::kSequence});
  using parallel::SequenceMethod;
  const config::SequenceParallelSection& section = config.sequence_parallel;
  const auto axis = parallel::make_sequence_axis(
      ranks.sequence,
      {.attention = section.attention == "ulysses" ? SequenceMethod::kUlysses
                    : section.attention == "ring"  ? SequenceMethod::kRing
                                                   : SequenceMethod::kAuto,
       .order = section.order == "zigzag" ? parallel::SequenceOrder::kZigzag : parallel::SequenceOrder::kContiguous});
  axis->join_ranks_of(ranks.world.get(), parts->world_ranks);
  parts->split.axis = axis;  // now: what fails below leaves it in parameters that are split already
  axis->tell_joins(false);   // the engine does, after the first step
  axis->watch_data([parts = parts.get()](const at::Tensor& plain) { parts->note_data(plain); });
  files.open(module, ranks);  // which knows the parameters as they are
  parts->split = parallel::split_module(
      module, axis, parallel::plan_module(module, {}, axis->size()),
      [](const std::string&, const at::Tensor& parameter, const Placement&) { return parameter.detach(); });
  for (const auto& item : module.named_parameters()) {
    if (is_split(item.value())) parts->parameters.push_back({item.key(), item.value(), leaf_of(item.value())});
  }
  return parts;
}

}  // namespace ds::engine
