// One layer that computes with other values than its parameters hold: quantised weights and inputs, pruned weights.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "layers/compressed/layer_quantization.h"
#include "layers/compressed/methods.h"
#include "layers/compressed/pruning.h"

namespace ds::model_compression {

enum class LayerKind { kLinear, kEmbedding, kConv2d };

// The child of a layer that keeps scores, masks and ranges.
constexpr const char* kKeeper = "compression";

class CompressedLayer {
 public:
  CompressedLayer(std::string name, const std::shared_ptr<torch::nn::Module>& module,
                  std::shared_ptr<const Progress> progress);

  // Registers what the method keeps, under DeepSpeed's names in a child of the layer, which is there for each method: a
  // layer that has it cannot be cloned into one with plain weights. Throws ConfigError, with the path of the rule,
  // where layer and rule do not fit, before anything is registered.
  void add(const Rule& rule);

  // Whether the module has its weight as [inputs, outputs]. Rules, scores and masks are of [outputs, inputs] in any
  // case.
  bool inputs_first() const { return inputs_first_; }
  // Turns a weight from the order that the module has it in to [outputs, inputs], or back.
  at::Tensor turned(const at::Tensor& weight) const { return inputs_first_ ? weight.t() : weight; }

  // Return what an operator computes with, in the graph, in the place of the tensors that the module gives it.
  at::Tensor compressed_weight(const at::Tensor& weight);
  at::Tensor compressed_bias(const at::Tensor& bias);
  at::Tensor compressed_input(const at::Tensor& input);
  bool changes_bias() const;

  const std::string& name() const { return name_; }
  LayerKind kind() const { return kind_; }
  std::shared_ptr<torch::nn::Module> module() const { return module_.lock(); }
  at::Tensor weight() const;
  const std::vector<Pruning>& prunings() const { return prunings_; }
  const std::optional<WeightQuantization>& weight_quantization() const { return weight_quantization_; }
  bool used() const { return used_; }            // an operator has got the weight
  bool bias_used() const { return bias_used_; }  // an operator has added the bias to the layer's product
  bool has_begun(const Rule& rule) const { return progress_->has_begun(rule); }

  // Whether masks are to be decided from the weight now, since their method has begun.
  bool awaits_masks();
  void decide_masks();  // with the weight whole

  // The layer's pruning by "snip_momentum" where its weight is trained; null: none.
  Pruning* snip();
  // Drops what was seen of a gradient with which no step was made.
  void drop_seen();
  // The quantisation of the inputs where it has a static range that training steps move now; null: none.
  InputQuantization* inputs_in_static_range();

  // The weight and bias that a trained layer is left with, as the module has them: `operands` whole values, at target
  // bits. `scores`: for each pruning as Pruning::final_mask() takes them. No graph.
  Operands final_values(const Operands& operands, const std::vector<at::Tensor>& scores) const;

 private:
  const std::string name_;
  const std::weak_ptr<torch::nn::Module> module_;
  const std::shared_ptr<const Progress> progress_;
  LayerKind kind_ = LayerKind::kLinear;
  bool inputs_first_ = false;
  std::optional<WeightQuantization> weight_quantization_;
  std::optional<InputQuantization> input_quantization_;
  std::atomic<bool> used_ = false;
  std::atomic<bool> bias_used_ = false;
  std::vector<Pruning> prunings_;  // in the order in which they are applied
};

// The kind of torch::nn's Linear, Embedding and Conv2d; nothing for others. A module of the program's own is a Linear
// where it has a parameter "weight" of two dimensions, [outputs, inputs] but in a Conv1D, and a Conv2d where it has one
// of four; one that is named "Embedding", as exported models have it, is an Embedding.
std::optional<LayerKind> kind_of(const torch::nn::Module& module);
bool applies_to(Method method, LayerKind kind);
// Return the bias and the weight of a layer; undefined where it has none.
at::Tensor bias_of(torch::nn::Module& module);
at::Tensor weight_of(torch::nn::Module& module);

}  // namespace ds::model_compression
