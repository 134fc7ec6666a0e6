// The mask of one pruning method over the weight of a layer, and over its bias where outputs are pruned.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <string>

#include "layers/compressed/methods.h"

namespace ds::model_compression {

// The weight and the bias of a layer.
struct Operands {
  at::Tensor weight;
  at::Tensor bias;  // undefined: none
};

// A mask over elements, rows, channels (output dimensions) or heads (blocks of input dimensions). Method "topk" makes
// it in each step from scores that are trained, "l1" decides it once from the weight, and "snip_momentum" changes it by
// scores of blocks.
class Pruning {
 public:
  // Registers what the method keeps for `weight` of the layer named `layer` in `keeper`, under DeepSpeed's names.
  // `seed` gives the first values of scores.
  Pruning(const Rule& rule, const std::string& layer, const at::Tensor& weight, torch::nn::Module& keeper,
          uint64_t seed);

  const Rule& rule() const { return rule_; }
  // The scores of "topk", a parameter of the layer, of the mask's shape; undefined for other methods.
  const at::Tensor& scores() const { return scores_; }
  const char* scores_name() const;
  // The scores of blocks of "snip_momentum", a buffer of the layer, float32; undefined for other methods.
  const at::Tensor& block_scores() const { return block_scores_; }
  // Whether it prunes outputs, so that the bias loses its elements too.
  bool masks_outputs() const;

  // The operands under the mask of now, in the graph.
  at::Tensor masked_weight(const at::Tensor& weight) const;
  at::Tensor masked_bias(const at::Tensor& bias) const;
  // The mask that a trained layer is left with, bool, flat: elements, rows, channels or heads that stay. `scores`:
  // whole values; unused with other methods than "topk".
  at::Tensor final_mask(const at::Tensor& scores) const;
  // Returns whole operands under that mask.
  Operands final_values(const Operands& operands, const at::Tensor& scores) const;

  // Both serve "l1" once it has begun, and do nothing for other methods: awaits_mask() says whether the mask is still
  // to be decided, and decide_mask() decides it by the whole weight.
  bool awaits_mask();
  void decide_mask(const at::Tensor& weight);

  // The four serve "snip_momentum". What an optimizer step adds to the scores of blocks is kept by see_gradient(), from
  // the whole weight and its gradient, and added by keep_seen() once the step was made. prune_blocks() makes the mask
  // that of the blocks that stay.
  void see_gradient(const at::Tensor& weight, const at::Tensor& gradient);
  void keep_seen();
  void drop_seen() { seen_.reset(); }
  void prune_blocks(const at::Tensor& stays) const;

 private:
  at::Tensor mask_now() const;

  Rule rule_;
  at::Tensor scores_;
  at::Tensor mask_;  // for other methods than "topk": a buffer of the layer, bool; all true until the method begins
  at::Tensor block_scores_;
  at::Tensor seen_;  // what the step at hand adds to block_scores_; undefined: nothing
  bool decided_ = false;
  int64_t seen_version_ = -1;  // the mask's version when `decided_` was found out
};

}  // namespace ds::model_compression
