#include "dsengine/pipeline.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <map>
#include <set>

#include "core/check.h"
#include "core/random_streams.h"
#include "core/tensor_check.h"
#include "pipeline/placed_errors.h"
#include "pipeline/stage_placement.h"
#include "pipeline/whole_names.h"

namespace ds::pipeline {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Tensors as_leaves(const Tensors& tensors) {
  Tensors leaves;
  for (const at::Tensor& tensor : tensors) {
    leaves.push_back(tensor.detach());
    if (tensor.requires_grad()) leaves.back().set_requires_grad(true);
  }
  return leaves;
}

// Seconds of forward and backward; `inputs` becomes the outputs.
double time_layer(const LayerSpec& layer, torch::nn::Module* module, Tensors& inputs) {
  const auto start = std::chrono::steady_clock::now();
  const Tensors outputs = layer.call(module, as_leaves(inputs));
  at::Tensor sum;
  for (const at::Tensor& output : outputs) {
    if (output.requires_grad()) sum = sum.defined() ? sum + output.sum() : output.sum();
  }
  if (sum.defined()) sum.backward();
  const double seconds = seconds_since(start);
  inputs = as_leaves(outputs);
  return seconds;
}

// The module "h.0" below `root` of "h.0.weight", made on the way; `name` keeps what is behind its last dot.
torch::nn::Module& owner_of(torch::nn::Module& root, std::string& name) {
  torch::nn::Module* parent = &root;
  for (size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.')) {
    const std::string part = name.substr(0, dot);
    name.erase(0, dot + 1);
    const auto children = parent->named_children();
    parent = children.contains(part) ? children[part].get()
                                     : parent->register_module(part, std::make_shared<torch::nn::Module>(part)).get();
  }
  return *parent;
}

// Registers the tensors of a layer under all their names in the whole model.
void register_whole_names(torch::nn::Module& root, const torch::nn::Module& layer, const WholeNames& tensors) {
  const auto parameters = layer.named_parameters();
  const auto buffers = layer.named_buffers();
  for (const WholeTensor& tensor : tensors) {
    const std::string& first = tensor.names.front();
    for (std::string name : tensor.names) {
      torch::nn::Module& owner = owner_of(root, name);
      if (owner.named_parameters(false).contains(name) || owner.named_buffers(false).contains(name)) continue;
      if (const at::Tensor* const parameter = parameters.find(first)) {
        owner.register_parameter(name, *parameter, parameter->requires_grad());
      } else {
        owner.register_buffer(name, buffers[first]);
      }
    }
  }
}

bool has_name(const WholeNames& tensors, const std::string& name) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const WholeTensor& tensor) {
    return std::find(tensor.names.begin(), tensor.names.end(), name) != tensor.names.end();
  });
}

}  // namespace

void LossFunction::require_one(const Tensors& outputs, const Tensors& labels) {
  require(outputs.size() == 1 && labels.size() == 1, "the loss takes one output and one label tensor, found ",
          outputs.size(), " and ", labels.size(), "; give the pipeline a loss of (const Tensors&, const Tensors&)");
}

PipelineModule::~PipelineModule() = default;

PipelineModule::PipelineModule(std::vector<LayerSpec> layers, PipelineOptions options)
    : torch::nn::Module("PipelineModule"), layers_(std::move(layers)), options_(std::move(options)) {
  require(!layers_.empty(), "PipelineModule: expected layers, found none");
  require(static_cast<bool>(options_.loss), "PipelineModule: expected a loss function, found none; pass ",
          "PipelineOptions{.loss = ...}");
  std::map<std::string, size_t> first;  // of each name
  std::map<std::string, std::string> name_of_key;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const LayerSpec& layer = layers_[i];
    const std::string& name_of_tie = name_of_key.emplace(layer.key, layer.name).first->second;
    require(layer.key.empty() || name_of_tie == layer.name, "PipelineModule: layers of key ", layer.key, " are named ",
            name_of_tie, " and ", layer.name, "; expected one name, for they share their parameters");
    const auto [found, inserted] = first.emplace(name_of_layer(i), i);
    if (inserted) continue;
    const LayerSpec& other = layers_[found->second];
    require(!layers_[i].key.empty() && layers_[i].key == other.key, "PipelineModule: layers ", found->second, " and ",
            i, " are both named ", lazy([&] { return name_of_layer(i); }),
            "; give them different names, or tie them with one key");
    require(layers_[i].type == other.type, "PipelineModule: layers ", found->second, " and ", i, " are tied by key ",
            layers_[i].key, ", but one is a ", other.type, " and one a ", layers_[i].type, "; expected one class");
  }
  require_own_weights();
}

// Each stage would train a copy of what layers share without a key. With one stage it is the same mistake.
void PipelineModule::require_own_weights() const {
  std::map<const void*, size_t> first;  // layer of each module that is there already, and of each of its weights
  const auto note = [&](const void* shared, size_t i) {
    const size_t other = first.emplace(shared, i).first->second;
    const std::string& key = layers_[i].key;
    const std::string& key_of_other = layers_[other].key;
    if (other == i || (!key.empty() && key == key_of_other)) return;
    const bool same = layers_[i].given == layers_[other].given;
    const std::string wanted = !key_of_other.empty() ? key_of_other
                               : !key.empty()        ? key
                                                     : cat("shared_", name_of_layer(other));
    throw UsageError(
        cat("PipelineModule: layers ", text_of_layer(other), " and ", text_of_layer(i), " share ",
            same ? "one module" : "weights", " without a common key: stages would train copies apart. ",
            same ? "Give both layers" : "Make what they share a layer of its own and give it, wherever it is used,",
            " .tied_by(\"", wanted, "\")"));
  };
  for (size_t i = 0; i < layers_.size(); ++i) {
    const auto& given = layers_[i].given;
    if (!given) continue;
    const std::vector<at::Tensor> weights = given->parameters();
    if (!weights.empty() || !given->buffers().empty()) note(given.get(), i);
    for (const at::Tensor& weight : weights) {
      if (weight.requires_grad()) note(weight.unsafeGetTensorImpl(), i);
    }
  }
}

std::string PipelineModule::name_of_layer(size_t index) const {
  return layers_[index].name.empty() ? std::to_string(index) : layers_[index].name;
}

// "5 (h.3, gpt::Block)"
std::string PipelineModule::text_of_layer(size_t index) const {
  const LayerSpec& layer = layers_[index];
  return cat(index, " (", layer.name.empty() ? "" : cat(layer.name, ", "), layer.type, ")");
}

std::string PipelineModule::describe(int stage) const {
  const auto begin = static_cast<size_t>(bounds_.at(static_cast<size_t>(stage)));
  const auto last = static_cast<size_t>(bounds_.at(static_cast<size_t>(stage) + 1)) - 1;
  return begin == last ? cat("layer ", text_of_layer(begin))
                       : cat("layers ", text_of_layer(begin), " to ", text_of_layer(last));
}

std::shared_ptr<torch::nn::Module> PipelineModule::build_layer(size_t index, bool seeded) const {
  if (seeded) at::manual_seed(options_.base_seed + index);
  return layers_[index].build();
}

// Each rank counts some of the layers, and tells the others. Those that do not say how much they train are built for
// it, one at a time.
std::vector<double> PipelineModule::count_parameters(const StagePlacement& placement) const {
  const int ranks = placement.ranks ? placement.ranks->size() : 1;
  const int rank = placement.ranks ? placement.ranks->rank() : 0;
  const KeptGenerator kept;  // layers are built only to look at them
  std::vector<double> counts(layers_.size());
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (static_cast<int>(i % static_cast<size_t>(ranks)) != rank) continue;
    if (const WholeNames* const tensors = whole_names_of(layers_[i])) {
      for (const WholeTensor& tensor : *tensors) counts[i] += static_cast<double>(tensor.trained);
      continue;
    }
    const auto module = build_layer(i, /*seeded=*/false);
    if (!module) continue;
    for (const at::Tensor& parameter : module->parameters()) {
      if (parameter.requires_grad()) counts[i] += static_cast<double>(parameter.numel());
    }
  }
  return counts;
}

std::vector<double> PipelineModule::measure() const {
  std::vector<double> seconds(layers_.size());
  const KeptGenerator kept;  // layers are built only to look at them
  const at::AutoGradMode with_grad(true);
  Tensors inputs = options_.profile_inputs;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const auto where = [&] { return cat("pipeline.partition: profile: layer ", text_of_layer(i), ": "); };
    try {
      const auto module = build_layer(i, /*seeded=*/false);
      Tensors warm = inputs;
      time_layer(layers_[i], module.get(), warm);
      seconds[i] = time_layer(layers_[i], module.get(), inputs);
    } catch (const c10::Error& error) {
      throw UsageError(cat(where(), error.what_without_backtrace()));
    } catch (const std::exception& error) {
      throw UsageError(cat(where(), error.what()));
    }
  }
  return seconds;
}

std::vector<double> PipelineModule::weights_of_layers(const StagePlacement& placement) const {
  const std::string& method = placement.partition;
  constexpr std::string_view kType = "type:";
  if (method.starts_with(kType)) {
    std::vector<std::string> types;
    for (const LayerSpec& layer : layers_) types.push_back(layer.type);
    return weights_of_type(types, method.substr(kType.size()));
  }
  require<ConfigError>(method == "parameters" || method == "profile", "pipeline.partition: expected \"parameters\", ",
                       "\"uniform\", \"type:REGEX\" or \"profile\", found \"", method, "\"");
  const bool profiles = method == "profile";
  require(!profiles || !options_.profile_inputs.empty(), "pipeline.partition: profile: expected ",
          "PipelineOptions.profile_inputs, a micro-batch for the first layer, found none");
  // All pipelines take one rank's seconds: two that measure by themselves may cut the layers at other places.
  comm::Communicator* const ranks = profiles && placement.world ? placement.world : placement.ranks;
  std::vector<double> weights(layers_.size());
  std::exception_ptr failure;
  try {
    if (!profiles) weights = count_parameters(placement);
    if (profiles && (!ranks || ranks->rank() == 0)) weights = measure();
  } catch (...) {
    failure = std::current_exception();  // the others wait for this rank
  }
  if (ranks && ranks->size() > 1) {
    weights.push_back(failure ? 1 : 0);
    at::Tensor shared = at::tensor(weights, at::kDouble).to(placement.device);
    ranks->all_reduce(shared, comm::ReduceOp::kSum, "weights of layers").wait();
    shared = shared.cpu();
    const auto* values = shared.const_data_ptr<double>();
    weights.assign(values, values + layers_.size());
    require(failure || values[layers_.size()] == 0, "pipeline.partition: ", method,
            ": a layer could not be built or run on another rank, whose message says which one and why");
  }
  if (failure) std::rethrow_exception(failure);
  return weights;
}

void PipelineModule::build(const StagePlacement& placement, Region checkpoint) {
  require(!built(), "this PipelineModule belongs to an engine already; make a new one");
  checkpoint_ = std::move(checkpoint);
  checkpoint_interval_ = placement.activation_checkpoint_interval;
  const auto stages = static_cast<int>(placement.rank_of.size());
  StageBounds bounds = stages == 1                        ? StageBounds{0, static_cast<int>(layers_.size())}
                       : placement.partition == "uniform" ? partition_uniform(static_cast<int>(layers_.size()), stages)
                                                          : partition_balanced(weights_of_layers(placement), stages);
  bounds_ = std::move(bounds);
  rank_of_ = placement.rank_of;
  build_own(placement);
  find_tied(placement);
}

void PipelineModule::build_own(const StagePlacement& placement) {
  own_.resize(layers_.size());
  modules_.resize(layers_.size());
  std::map<std::string, std::shared_ptr<torch::nn::Module>> of_key;  // one for all layers of a key on this rank
  for (size_t s = 0; s < placement.rank_of.size(); ++s) {
    if (placement.rank_of[s] != placement.rank) continue;
    for (auto i = static_cast<size_t>(bounds_[s]); i < static_cast<size_t>(bounds_[s + 1]); ++i) {
      own_[i] = 1;
      const std::string& key = layers_[i].key;
      if (!key.empty() && of_key.contains(key)) {
        modules_[i] = of_key[key];
        continue;
      }
      size_t origin = i;  // tied layers start as the first one of their key does
      for (size_t k = 0; !key.empty() && k < i && origin == i; ++k) origin = layers_[k].key == key ? k : i;
      adopt(i, build_layer(origin, placement.seed_layers));
      if (!key.empty()) of_key[key] = modules_[i];
    }
  }
}

// Registers the module under its name, each part before a dot as a module of its own; or its tensors under theirs.
void PipelineModule::adopt(size_t index, const std::shared_ptr<torch::nn::Module>& module) {
  modules_[index] = module;
  if (!module) return;
  if (const WholeNames* const names = whole_names_of(layers_[index])) {
    return register_whole_names(*this, *module, *names);
  }
  std::string name = name_of_layer(index);
  torch::nn::Module& owner = owner_of(*this, name);
  owner.register_module(name, module);
}

void PipelineModule::find_tied(const StagePlacement& placement) {
  std::map<std::string, std::pair<std::vector<std::string>, std::set<int>>> ties;  // by key: names, ranks
  for (size_t s = 0; s + 1 < bounds_.size(); ++s) {
    const auto note = [&](const std::string& key, const std::vector<std::string>& names) {
      ties.try_emplace(key, names, std::set<int>()).first->second.second.insert(placement.rank_of[s]);
    };
    for (auto i = static_cast<size_t>(bounds_[s]); i < static_cast<size_t>(bounds_[s + 1]); ++i) {
      if (!layers_[i].key.empty()) note(layers_[i].key, {name_of_layer(i)});
      const WholeNames* const tensors = whole_names_of(layers_[i]);
      if (tensors == nullptr) continue;
      for (const WholeTensor& tensor : *tensors) note(tensor.names.front(), tensor.names);
    }
  }
  for (const auto& [key, tie] : ties) {
    const auto& [names, ranks] = tie;
    if (ranks.size() > 1) tied_.push_back({key, names, {ranks.begin(), ranks.end()}});
  }
}

std::vector<at::Tensor> PipelineModule::tied_parameters(const std::string& key) const {
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (!modules_[i]) continue;
    if (layers_[i].key == key) return modules_[i]->parameters();
    if (whole_names_of(layers_[i]) == nullptr) continue;
    const auto parameters = modules_[i]->named_parameters();
    if (const at::Tensor* const tensor = parameters.find(key)) return {*tensor};
  }
  return {};
}

std::vector<at::Tensor> PipelineModule::parameters_of(int stage) const {
  std::vector<at::Tensor> result;
  const auto s = static_cast<size_t>(stage);
  for (auto i = static_cast<size_t>(bounds_.at(s)); i < static_cast<size_t>(bounds_.at(s + 1)); ++i) {
    if (!modules_[i]) continue;
    const std::vector<at::Tensor> own = modules_[i]->parameters();
    result.insert(result.end(), own.begin(), own.end());
  }
  return result;
}

bool PipelineModule::is_elsewhere(const std::string& name) const {
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (own_[i]) continue;
    const WholeNames* const names = whole_names_of(layers_[i]);
    if (names ? has_name(*names, name) : name.starts_with(name_of_layer(i) + ".")) return true;
  }
  return false;
}

Tensors PipelineModule::run_layers(size_t begin, size_t end, const Tensors& inputs, int stage) const {
  Tensors tensors = inputs;
  for (size_t i = begin; i < end; ++i) {
    const auto given = [&] {
      std::string text;
      for (const at::Tensor& tensor : tensors) text += cat(text.empty() ? "" : ", ", ds::describe(tensor));
      return cat(" (it was given ", text, ")");
    };
    tensors = with_place([&] { return cat("stage ", stage, ", layer ", text_of_layer(i), ": "); }, given,
                         [&] { return layers_[i].call(modules_[i].get(), tensors); });
  }
  return tensors;
}

Tensors PipelineModule::forward_stage(int stage, const Tensors& inputs) const {
  require(built(), "PipelineModule: nothing is built before engine::initialize");
  const auto begin = static_cast<size_t>(bounds_.at(static_cast<size_t>(stage)));
  const auto end = static_cast<size_t>(bounds_.at(static_cast<size_t>(stage) + 1));
  if (checkpoint_interval_ == 0 || !at::GradMode::is_enabled()) return run_layers(begin, end, inputs, stage);
  Tensors tensors = inputs;
  const auto interval = static_cast<size_t>(checkpoint_interval_);
  for (size_t i = begin; i < end; i += interval) {
    const size_t stop = std::min(end, i + interval);
    tensors =
        checkpoint_([this, i, stop, stage](const Tensors& in) { return run_layers(i, stop, in, stage); }, tensors);
  }
  return tensors;
}

Tensors PipelineModule::forward(const Tensors& inputs) const {
  require(built(), "PipelineModule: nothing is built before engine::initialize");
  const auto elsewhere = std::find(own_.begin(), own_.end(), 0);
  require(elsewhere == own_.end(), "PipelineModule::forward: layer ", elsewhere - own_.begin(),
          " is on another rank; use engine->eval_batch");
  Tensors tensors = inputs;
  for (int s = 0; s + 1 < static_cast<int>(bounds_.size()); ++s) tensors = forward_stage(s, tensors);
  return tensors;
}

at::Tensor PipelineModule::forward(const at::Tensor& input) const {
  const Tensors outputs = forward(Tensors{input});
  require(outputs.size() == 1, "PipelineModule::forward: expected one output, found ", outputs.size(),
          "; pass and take Tensors");
  return outputs[0];
}

}  // namespace ds::pipeline
