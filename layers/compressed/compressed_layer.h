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

#include "layers/compressed/methods.h"

namespace ds::model_compression {

enum class LayerKind { kLinear, kEmbedding, kConv2d };

// A mask over the weight: over elements, rows, channels (output dimensions) or heads (blocks of input dimensions).
struct Pruning {
  Rule rule;
  at::Tensor scores;  // "topk": a parameter of the layer, of the mask's shape
  at::Tensor mask;    // else: a buffer of the layer, bool; all true until the method begins
  at::Tensor blocks;  // "snip_momentum": scores of blocks, a buffer of the layer, float32
  at::Tensor seen;    // likewise: of the gradient of the step at hand; undefined: none
  bool decided = false;
  int64_t seen_version = -1;
};

// The state that layers of a model share.
struct Progress {
  int64_t step = 0;  // optimizer steps that are done
  uint64_t seed = 0;
};

// The child of a layer that keeps scores, masks and ranges.
constexpr const char* kKeeper = "compression";

struct Operands {
  at::Tensor weight;
  at::Tensor bias;  // undefined: none
};

class CompressedLayer {
 public:
  CompressedLayer(std::string name, const std::shared_ptr<torch::nn::Module>& module,
                  std::shared_ptr<const Progress> progress);

  // Registers what the method keeps, under DeepSpeed's names in a child of the layer, which is there for each method: a
  // layer that has it cannot be cloned into one with plain weights. Throws ConfigError, with the path of the rule,
  // where layer and rule do not fit, before anything is registered.
  void add(const Rule& rule);

  // The tensors that an operator computes with, in the graph, in the place of those that the module gives it.
  at::Tensor compressed_weight(const at::Tensor& weight);
  at::Tensor compressed_bias(const at::Tensor& bias);
  at::Tensor compressed_input(const at::Tensor& input);
  bool changes_bias() const;

  const std::string& name() const { return name_; }
  LayerKind kind() const { return kind_; }
  std::shared_ptr<torch::nn::Module> module() const { return module_.lock(); }
  at::Tensor weight() const;
  const std::vector<Pruning>& prunings() const { return prunings_; }
  const std::optional<Rule>& weight_rule() const { return weight_rule_; }
  bool used() const { return used_; }            // an operator has come with the weight
  bool bias_used() const { return bias_used_; }  // and one that adds the bias to what that gave
  bool has_begun(const Rule& rule) const { return progress_->step >= rule.schedule_offset; }

  // Masks that are to be decided from the weight now, since their method has begun.
  bool awaits_masks();
  void decide_masks();  // with the weight whole

  // Serves "snip_momentum", null without: the layer's pruning where its weight is trained. What an optimizer step adds
  // to the scores of its blocks is kept by see_gradient(), of the whole weight and its gradient, and added by
  // keep_seen() once the step was made.
  Pruning* snip();
  void see_gradient(const at::Tensor& weight, const at::Tensor& gradient);
  void keep_seen();
  void drop_seen();

  // For static ranges: whether training steps look at inputs now; {-minimum, maximum} of what this rank saw since the
  // last call of take_observed(), float32, -inf where nothing; and the range from what all ranks saw.
  bool observes() const;
  at::Tensor take_observed();
  void follow_range(const at::Tensor& observed);

  // The weight and bias that a trained layer is left with: `operands` whole values, at target bits. No graph.
  Operands final_values(const Operands& operands, const std::vector<at::Tensor>& scores) const;
  // The mask of one pruning, bool, flat: rows, channels or heads that stay. `scores`: whole values; unused with "l1".
  static at::Tensor final_mask(const Pruning& pruning, const at::Tensor& scores);

 private:
  at::Tensor quantized_weight(const at::Tensor& weight, const Rule& rule, int64_t step, bool final) const;
  at::Tensor quantized_input(const at::Tensor& input);
  at::Tensor in_static_range(const at::Tensor& input);
  at::Tensor range() const;  // float32 [2]
  void set_range(const at::Tensor& range);
  void add_pruning(const Rule& rule);
  static at::Tensor mask_now(const Pruning& pruning);
  std::shared_ptr<torch::nn::Module> keeper();
  at::Tensor l1_scores(const Rule& rule) const;

  const std::string name_;
  const std::weak_ptr<torch::nn::Module> module_;
  const std::shared_ptr<const Progress> progress_;
  LayerKind kind_ = LayerKind::kLinear;
  std::optional<Rule> weight_rule_;
  std::optional<Rule> input_rule_;
  // A buffer [2, 2]: minimum and maximum, and below each what the buffer's dtype left of it. Their sum is the range,
  // also after a cast of the model.
  at::Tensor range_;
  at::Tensor observed_;  // undefined: nothing
  std::atomic<bool> used_ = false;
  std::atomic<bool> bias_used_ = false;
  std::vector<Pruning> prunings_;  // in the order in which they are applied
};

// The kind of torch::nn's Linear, Embedding and Conv2d; nothing for others. A module of the program's own is a Linear
// where it has a parameter "weight" of two dimensions, [outputs, inputs], and a Conv2d where it has one of four.
std::optional<LayerKind> kind_of(const torch::nn::Module& module);
bool applies_to(Method method, LayerKind kind);
// Undefined where the layer has none.
at::Tensor bias_of(torch::nn::Module& module);
at::Tensor weight_of(torch::nn::Module& module);

}  // namespace ds::model_compression
