#include "layers/compressed/compressed_layer.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/replay/recomputation.h"
#include "layers/layer_class.h"

namespace ds::model_compression {
namespace {

// A parameter of a module of the program's own; undefined where it has none of this name.
at::Tensor own_parameter(const torch::nn::Module& module, const char* name) {
  const auto parameters = module.named_parameters(/*recurse=*/false);
  const at::Tensor* const found = parameters.find(name);
  return found == nullptr ? at::Tensor() : *found;
}

// The child of a layer that keeps what methods have registered; made where there is none.
std::shared_ptr<torch::nn::Module> keeper_of(torch::nn::Module& layer) {
  if (const auto children = layer.named_children(); const auto* known = children.find(kKeeper)) return *known;
  return layer.register_module(kKeeper, std::make_shared<torch::nn::Module>(kKeeper));
}

}  // namespace

std::optional<LayerKind> kind_of(const torch::nn::Module& module) {
  if (dynamic_cast<const torch::nn::LinearImpl*>(&module) != nullptr) return LayerKind::kLinear;
  if (dynamic_cast<const torch::nn::EmbeddingImpl*>(&module) != nullptr) return LayerKind::kEmbedding;
  if (dynamic_cast<const torch::nn::Conv2dImpl*>(&module) != nullptr) return LayerKind::kConv2d;
  const at::Tensor weight = own_parameter(module, "weight");
  if (!weight.defined()) return std::nullopt;
  // An exported model (dsengine/exported_model.h) has plain modules, named by their classes in Python.
  if (weight.dim() == 2) return module.name() == "Embedding" ? LayerKind::kEmbedding : LayerKind::kLinear;
  if (weight.dim() == 4) return LayerKind::kConv2d;
  return std::nullopt;
}

bool applies_to(Method method, LayerKind kind) {
  switch (method) {
    case Method::kWeightQuantization:
      return true;
    case Method::kActivationQuantization:
    case Method::kSparsePruning:
      return kind != LayerKind::kEmbedding;
    case Method::kRowPruning:
    case Method::kHeadPruning:
      return kind == LayerKind::kLinear;
    case Method::kChannelPruning:
      return kind == LayerKind::kConv2d;
  }
  return false;
}

at::Tensor weight_of(torch::nn::Module& module) {
  if (auto* linear = dynamic_cast<torch::nn::LinearImpl*>(&module)) return linear->weight;
  if (auto* embedding = dynamic_cast<torch::nn::EmbeddingImpl*>(&module)) return embedding->weight;
  if (auto* conv = dynamic_cast<torch::nn::Conv2dImpl*>(&module)) return conv->weight;
  return own_parameter(module, "weight");
}

at::Tensor bias_of(torch::nn::Module& module) {
  if (auto* linear = dynamic_cast<torch::nn::LinearImpl*>(&module)) return linear->bias;
  if (auto* conv = dynamic_cast<torch::nn::Conv2dImpl*>(&module)) return conv->bias;
  return own_parameter(module, "bias");
}

CompressedLayer::CompressedLayer(std::string name, const std::shared_ptr<torch::nn::Module>& module,
                                 std::shared_ptr<const Progress> progress)
    : name_(std::move(name)), module_(module), progress_(std::move(progress)) {
  const auto kind = kind_of(*module);
  ensure(kind.has_value(), "a compressed layer is a Linear, an Embedding or a Conv2d");
  kind_ = *kind;
  inputs_first_ = kind_ == LayerKind::kLinear && layers::has_inputs_first(*module);
}

at::Tensor CompressedLayer::weight() const {
  const auto module = module_.lock();
  return module ? weight_of(*module) : at::Tensor();
}

void CompressedLayer::add(const Rule& rule) {
  const at::Tensor own = turned(weight());
  const auto is_same = [&](const Pruning& other) { return other.rule().method == rule.method; };
  const bool twice = rule.method == Method::kWeightQuantization ? weight_quantization_.has_value()
                     : rule.method == Method::kActivationQuantization
                         ? input_quantization_.has_value()
                         : std::any_of(prunings_.begin(), prunings_.end(), is_same);
  require<ConfigError>(!twice, rule.path, ".modules: expected each layer in one group of the method, found ", name_,
                       " in two of its patterns");
  const bool by_row = kind_ == LayerKind::kEmbedding;
  require<ConfigError>(rule.method != Method::kWeightQuantization || by_row || own.numel() % rule.groups == 0,
                       rule.path, ": expected quantize_groups that divide the weight of ", name_, ", ", own.sizes(),
                       ", found ", rule.groups);
  require<ConfigError>(rule.method != Method::kHeadPruning || own.size(1) % rule.heads == 0, rule.path,
                       ": expected num_heads that divide the inputs of ", name_, ", ", own.size(1), ", found ",
                       rule.heads);
  require<ConfigError>(!inputs_first_ || rule.related.empty(), rule.path, ".related_modules: expected layers whose ",
                       "weight is [outputs, inputs], found ", name_, ", a Conv1D; leave the key out: its outputs are ",
                       "masked, and stay in their place");
  const auto keeper = keeper_of(*module_.lock());
  if (rule.method == Method::kWeightQuantization) {
    weight_quantization_.emplace(rule, name_, by_row);
  } else if (rule.method == Method::kActivationQuantization) {
    input_quantization_.emplace(rule, *keeper, own.is_meta() ? at::Device(at::kCPU) : own.device());
  } else {
    prunings_.emplace_back(rule, name_, own, *keeper, progress_->seed);
    std::stable_sort(prunings_.begin(), prunings_.end(),
                     [](const Pruning& a, const Pruning& b) { return a.rule().method < b.rule().method; });
  }
}

at::Tensor CompressedLayer::compressed_weight(const at::Tensor& weight) {
  used_ = true;
  at::Tensor result = turned(weight);
  if (weight_quantization_ && has_begun(weight_quantization_->rule())) {
    result = weight_quantization_->apply(result, *progress_);
  }
  for (const Pruning& pruning : prunings_) {
    if (has_begun(pruning.rule())) result = pruning.masked_weight(result);
  }
  return turned(result);
}

at::Tensor CompressedLayer::compressed_bias(const at::Tensor& bias) {
  bias_used_ = true;
  at::Tensor result = bias;
  for (const Pruning& pruning : prunings_) {
    if (pruning.masks_outputs() && has_begun(pruning.rule())) result = pruning.masked_bias(result);
  }
  return result;
}

at::Tensor CompressedLayer::compressed_input(const at::Tensor& input) {
  if (!input_quantization_ || !has_begun(input_quantization_->rule())) return input;
  const bool follows = input_quantization_->rule().static_range;
  if (follows && module_.lock()->is_training() && !Recomputation::is_running()) input_quantization_->observe(input);
  return input_quantization_->apply(input);
}

bool CompressedLayer::changes_bias() const {
  return std::any_of(prunings_.begin(), prunings_.end(), [](const Pruning& one) { return one.masks_outputs(); });
}

bool CompressedLayer::awaits_masks() {
  bool any = false;
  for (Pruning& pruning : prunings_) {
    if (has_begun(pruning.rule()) && pruning.awaits_mask()) any = true;
  }
  return any;
}

void CompressedLayer::decide_masks() {
  const at::NoGradGuard no_grad;
  for (Pruning& pruning : prunings_) {
    if (has_begun(pruning.rule())) pruning.decide_mask(turned(weight()));
  }
}

Pruning* CompressedLayer::snip() {
  if (!weight().requires_grad()) return nullptr;
  const auto found =
      std::find_if(prunings_.begin(), prunings_.end(), [](const Pruning& one) { return one.rule().snip; });
  return found == prunings_.end() ? nullptr : &*found;
}

void CompressedLayer::drop_seen() {
  for (Pruning& pruning : prunings_) pruning.drop_seen();
}

InputQuantization* CompressedLayer::inputs_in_static_range() {
  if (!input_quantization_) return nullptr;
  const Rule& rule = input_quantization_->rule();
  return rule.static_range && has_begun(rule) ? &*input_quantization_ : nullptr;
}

Operands CompressedLayer::final_values(const Operands& operands, const std::vector<at::Tensor>& scores) const {
  const at::NoGradGuard no_grad;
  Operands result = {.weight = turned(operands.weight), .bias = operands.bias};
  if (weight_quantization_) result.weight = weight_quantization_->final_values(result.weight);
  for (size_t i = 0; i < prunings_.size(); ++i) result = prunings_[i].final_values(result, scores[i]);
  result.weight = turned(result.weight).contiguous();
  return result;
}

}  // namespace ds::model_compression
