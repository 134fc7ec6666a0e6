#include "layers/compressed/compressed_model.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>
#include <torch/nn/modules/batchnorm.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "core/name_pattern.h"
#include "core/tensor_table.h"
#include "layers/compressed/layer_quantization.h"
#include "layers/compressed/pruning.h"
#include "layers/compressed/snip_momentum.h"
#include "layers/layer_class.h"

namespace ds::model_compression {
namespace {

// A pattern of the config: a regular expression that is found anywhere in a module's name, or "*" for all.
class ModulePattern {
 public:
  explicit ModulePattern(const std::string& text)
      : pattern_(text == "*" ? NamePattern::stars(text) : NamePattern::regex(text)) {}
  bool matches(const std::string& name) const { return pattern_.matches(name, NamePart::kAnywhere); }

 private:
  NamePattern pattern_;
};

template <class Wanted>
std::vector<RelatedLayer> matching(torch::nn::Module& module, const std::string& pattern, const Wanted& wanted) {
  const ModulePattern compiled(pattern);
  std::vector<RelatedLayer> result;
  for (const auto& item : module.named_modules("", /*include_self=*/true)) {
    if (compiled.matches(item.key()) && wanted(*item.value(), item.key())) result.push_back({item.key(), item.value()});
  }
  return result;
}

bool has_dimensions(const torch::nn::Module& module) {
  const auto kind = kind_of(module);
  return (kind && *kind != LayerKind::kEmbedding) ||
         dynamic_cast<const torch::nn::BatchNorm2dImpl*>(&module) != nullptr;
}

// Whether blocks divide the layer's weight; said where they do not.
bool takes_blocks(torch::nn::Module& module, const std::string& name, const Rule& rule) {
  const at::Tensor stored = weight_of(module);
  const at::Tensor weight = layers::has_inputs_first(module) && stored.dim() == 2 ? stored.t() : stored;
  const BlockSize& block = rule.snip->block;
  if (has_blocks(weight, block)) return true;
  log::warning(rule.path, ".block_pattern: ", name, " is not pruned: blocks of ", block.rows, "x", block.columns,
               " do not divide its weight, ", weight.sizes());
  return false;
}

// For each of `count` layers, the ones that the patterns give it: the k-th match of a pattern is of the k-th layer.
std::vector<std::vector<RelatedLayer>> related_of(torch::nn::Module& module, const Rule& rule, size_t entry,
                                                  size_t count) {
  std::vector<std::vector<RelatedLayer>> result(count);
  for (const std::string& pattern : rule.related[entry]) {
    const auto found = matching(module, pattern, [](const auto& of, const std::string&) { return has_dimensions(of); });
    require<ConfigError>(found.size() == count, rule.path, ".related_modules: expected ", pattern, " to match as many ",
                         "layers as \"", rule.modules[entry], "\" of modules, ", count, ", found ", found.size());
    for (size_t i = 0; i < count; ++i) result[i].push_back(found[i]);
  }
  return result;
}

using LayersOfTensor = std::vector<std::shared_ptr<CompressedLayer>>;
TensorTable<LayersOfTensor>& layers_by_weight() {
  static TensorTable<LayersOfTensor> table;
  return table;
}
TensorTable<LayersOfTensor>& layers_by_bias() {
  static TensorTable<LayersOfTensor> table;
  return table;
}

template <class IsGone>
void drop_layers(const IsGone& is_gone) {
  for (TensorTable<LayersOfTensor>* const table : {&layers_by_weight(), &layers_by_bias()}) {
    table->drop([&](LayersOfTensor& layers) {
      std::erase_if(layers, [&](const auto& layer) { return is_gone(*layer); });
      return layers.empty();
    });
  }
}

void note_layer(TensorTable<LayersOfTensor>& table, const at::Tensor& tensor,
                const std::shared_ptr<CompressedLayer>& layer) {
  table.change(tensor, [&](LayersOfTensor& layers) { layers.push_back(layer); });
}

// The models of modules, by the module.
struct AttachedModels {
  struct Attached {
    std::weak_ptr<torch::nn::Module> module;
    std::shared_ptr<CompressedModel> model;
  };
  std::shared_mutex mutex;
  std::unordered_map<const torch::nn::Module*, Attached> models;

  static AttachedModels& of_process() {
    static AttachedModels models;
    return models;
  }
};

}  // namespace

CompressedModel::CompressedModel(torch::nn::Module& module, const std::vector<Rule>& rules, uint64_t seed) {
  progress_->seed = seed;
  for (const Rule& rule : rules) add_rule(module, rule);
}

std::shared_ptr<CompressedLayer> CompressedModel::layer_of(const RelatedLayer& found) {
  for (const auto& layer : layers_) {
    if (layer->name() == found.name) return layer;
  }
  return layers_.emplace_back(std::make_shared<CompressedLayer>(found.name, found.module, progress_));
}

void CompressedModel::add_rule(torch::nn::Module& module, const Rule& rule) {
  const std::vector<ModulePattern> excluding(rule.excluded.begin(), rule.excluded.end());
  for (size_t entry = 0; entry < rule.modules.size(); ++entry) {
    const auto wanted = [&](torch::nn::Module& of, const std::string& name) {
      const auto kind = kind_of(of);
      const bool excluded = std::any_of(excluding.begin(), excluding.end(),
                                        [&](const ModulePattern& pattern) { return pattern.matches(name); });
      return kind && applies_to(rule.method, *kind) && !excluded && (!rule.snip || takes_blocks(of, name, rule));
    };
    const auto found = matching(module, rule.modules[entry], wanted);
    require<ConfigError>(!found.empty() || !rule.snip, rule.path, ": expected a Linear or Conv2d layer that ",
                         "excluded_modules leaves and that block_pattern divides, found none in the model");
    require<ConfigError>(!found.empty(), rule.path, ".modules: expected \"", rule.modules[entry],
                         "\" to match a layer ", "that ", name_of(rule.method),
                         " has a meaning for, found none in the model");
    std::vector<std::vector<RelatedLayer>> related(found.size());
    if (!rule.related.empty()) related = related_of(module, rule, entry, found.size());
    for (size_t i = 0; i < found.size(); ++i) {
      const auto layer = layer_of(found[i]);
      layer->add(rule);
      if (!rule.related.empty()) cuts_.push_back({layer, rule.method, related[i]});
    }
  }
}

void CompressedModel::advance(int64_t step, const RanksOfModel& ranks) {
  const at::NoGradGuard no_grad;
  const bool ends_step = !std::exchange(restarted_, false) && step == progress_->step + 1;
  if (ends_step) {
    move_ranges(ranks);
    for (const auto& layer : layers_) {
      if (Pruning* const pruning = layer->snip()) pruning->keep_seen();
    }
    warn_of_unused();
  } else if (step != progress_->step) {
    forget_observed();
    drop_gradients();
  }
  progress_->step = step;
  prune_blocks(/*jumped=*/!ends_step);
  for (const auto& layer : layers_) {
    if (layer->awaits_masks()) ranks.with_whole(layer->weight(), [&] { layer->decide_masks(); });
  }
}

bool CompressedModel::follows_gradients() const {
  return std::any_of(layers_.begin(), layers_.end(), [](const auto& layer) { return layer->snip() != nullptr; });
}

bool CompressedModel::needs_gradients() const {
  return std::any_of(layers_.begin(), layers_.end(), [&](const auto& layer) {
    const Pruning* const pruning = layer->snip();
    return pruning != nullptr && (masks_are_due_ || snip_counts(pruning->rule(), progress_->step));
  });
}

void CompressedModel::see_gradients(const std::function<WeightAndGradient(const at::Tensor& weight)>& values_of) {
  const at::NoGradGuard no_grad;
  for (const auto& layer : layers_) {
    Pruning* const pruning = layer->snip();
    if (pruning == nullptr) continue;
    const WeightAndGradient values = values_of(layer->weight());
    pruning->see_gradient(layer->turned(values.weight), layer->turned(values.gradient));
  }
}

void CompressedModel::drop_gradients() {
  for (const auto& layer : layers_) layer->drop_seen();
}

std::vector<at::Tensor> CompressedModel::float32_buffers() const {
  std::vector<at::Tensor> buffers;
  for (const auto& layer : layers_) {
    for (const Pruning& pruning : layer->prunings()) {
      if (pruning.block_scores().defined()) buffers.push_back(pruning.block_scores());
    }
  }
  return buffers;
}

// Masks of "snip_momentum" that change with the step, of all layers together. A change before which no gradient was
// seen, as where all steps before it overflowed, waits for one.
void CompressedModel::prune_blocks(bool jumped) {
  std::vector<Pruning*> prunings;
  for (const auto& layer : layers_) {
    if (Pruning* const pruning = layer->snip()) prunings.push_back(pruning);
  }
  if (prunings.empty()) return;
  const Rule& rule = prunings.front()->rule();  // one for all
  const std::optional<double> ratio = snip_due_ratio(rule, progress_->step);
  const bool changes = snip_dense_ratio(rule, progress_->step).has_value();
  if (!ratio) masks_are_due_ = false;
  if (!ratio || (!changes && !masks_are_due_ && !jumped)) return;
  std::vector<at::Tensor> scores;
  bool any = false;
  for (const Pruning* const pruning : prunings) {
    scores.push_back(pruning->block_scores());
    any = any || pruning->block_scores().any().item<bool>();
  }
  const bool was_due = std::exchange(masks_are_due_, !any);
  if (!any && !was_due) {
    log::warning(rule.path, ": at step ", progress_->step,
                 " no layer has lost blocks, as no gradient has been seen: they ",
                 "are chosen after the first step that is applied");
  }
  if (!any || (!changes && !was_due)) return;  // after a load masks are those that were saved
  const std::vector<at::Tensor> masks = best_blocks(scores, *ratio);
  for (size_t i = 0; i < prunings.size(); ++i) prunings[i]->prune_blocks(masks[i]);
}

void CompressedModel::move_ranges(const RanksOfModel& ranks) {
  std::vector<InputQuantization*> observing;  // in the step that is over
  for (const auto& layer : layers_) {
    if (InputQuantization* const range = layer->inputs_in_static_range()) observing.push_back(range);
  }
  if (observing.empty()) return;
  std::vector<at::Tensor> seen;
  for (InputQuantization* const range : observing) seen.push_back(range->take_observed());
  at::Tensor all = at::stack(seen);
  if (ranks.largest) ranks.largest(all);
  for (size_t i = 0; i < observing.size(); ++i) observing[i]->follow(all[static_cast<int64_t>(i)]);
}

void CompressedModel::forget_observed() {
  for (const auto& layer : layers_) {
    if (InputQuantization* const range = layer->inputs_in_static_range()) range->take_observed();
  }
}

bool CompressedModel::has_scores(const at::Tensor& parameter) const {
  return std::any_of(layers_.begin(), layers_.end(), [&](const auto& layer) {
    return std::any_of(layer->prunings().begin(), layer->prunings().end(),
                       [&](const Pruning& one) { return one.scores().defined() && one.scores().is_same(parameter); });
  });
}

void CompressedModel::warn_of_unused() {
  if (std::exchange(looked_for_unused_, true)) return;
  std::string names;
  std::string biases;
  const auto add = [](std::string& list, const CompressedLayer& layer) {
    list += cat(list.empty() ? "" : ", ", layer.name().empty() ? "the model" : layer.name());
  };
  for (const auto& layer : layers_) {
    if (!layer->used()) add(names, *layer);
    const bool has_bias = layer->changes_bias() && layer->module() && bias_of(*layer->module()).defined();
    if (layer->used() && has_bias && !layer->bias_used()) add(biases, *layer);
  }
  if (!biases.empty()) {
    log::warning("compression_training: in the first step no operator added the bias of ", biases, ", whose outputs ",
                 "are pruned, to the product as linear, addmm or add_ do: it stays whole, and redundancy_clean() will ",
                 "refuse it (said once)");
  }
  if (names.empty()) return;
  log::warning("compression_training: in the first step no operator linear, embedding or conv2d got the weight of ",
               names,
               ", whose rules have no effect until one does: layers are known by their weight as their module has it ",
               "(said once)");
}

void CompressedModel::restart() {
  restarted_ = true;
  forget_observed();
  drop_gradients();
}

void attach(const std::shared_ptr<torch::nn::Module>& module, std::shared_ptr<CompressedModel> model) {
  register_operators_of(model->layers());
  drop_layers([](const CompressedLayer& layer) { return layer.module() == nullptr; });
  for (const auto& layer : model->layers()) {
    note_layer(layers_by_weight(), layer->weight(), layer);
    const at::Tensor bias = layer->changes_bias() ? bias_of(*layer->module()) : at::Tensor();
    if (bias.defined()) note_layer(layers_by_bias(), bias, layer);
  }
  AttachedModels& attached = AttachedModels::of_process();
  const std::unique_lock lock(attached.mutex);
  std::erase_if(attached.models, [](const auto& entry) { return entry.second.module.expired(); });
  attached.models[module.get()] = {module, std::move(model)};
}

std::shared_ptr<CompressedModel> find_model(const torch::nn::Module& module) {
  AttachedModels& attached = AttachedModels::of_process();
  const std::shared_lock lock(attached.mutex);
  const auto found = attached.models.find(&module);
  return found == attached.models.end() || found->second.module.expired() ? nullptr : found->second.model;
}

std::string layer_of_another(torch::nn::Module& module) {
  const auto own = find_model(module);
  const auto is_own = [&](const std::shared_ptr<CompressedLayer>& layer) {
    return own && std::find(own->layers().begin(), own->layers().end(), layer) != own->layers().end();
  };
  for (const auto& item : module.named_modules("", /*include_self=*/true)) {
    const at::Tensor weight = kind_of(*item.value()) ? weight_of(*item.value()) : at::Tensor();
    if (!weight.defined()) continue;
    for (const auto& layer : layers_by_weight().find(weight)) {
      if (layer->weight().is_same(weight) && !is_own(layer)) return item.key().empty() ? "the model" : item.key();
    }
  }
  return "";
}

void detach(torch::nn::Module& module) {
  AttachedModels& attached = AttachedModels::of_process();
  const std::unique_lock lock(attached.mutex);
  const auto found = attached.models.find(&module);
  if (found == attached.models.end()) return;
  std::set<const CompressedLayer*> own;
  for (const auto& layer : found->second.model->layers()) own.insert(layer.get());
  drop_layers([&](const CompressedLayer& layer) { return own.contains(&layer); });
  attached.models.erase(found);
}

std::shared_ptr<CompressedLayer> find_layer_of_bias(const at::Tensor& bias) {
  for (auto& layer : layers_by_bias().find(bias)) {
    const auto module = layer->module();
    if (module && bias_of(*module).is_same(bias)) return std::move(layer);
  }
  return nullptr;
}

std::shared_ptr<CompressedLayer> find_layer(const at::Tensor& weight, LayerKind kind) {
  for (auto& layer : layers_by_weight().find(weight)) {
    // The module may have replaced it.
    if (layer->kind() == kind && layer->weight().is_same(weight)) return std::move(layer);
  }
  return nullptr;
}

}  // namespace ds::model_compression
