// The quantisation of one layer: of its weight, and of its input.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <string>

#include "layers/compressed/methods.h"

namespace ds::model_compression {

// The state that layers of a model share.
struct Progress {
  bool has_begun(const Rule& rule) const { return step >= rule.schedule_offset; }

  int64_t step = 0;  // optimizer steps that are done
  uint64_t seed = 0;
};

// The rule of weight_quantization of a layer, by which its weight is quantised.
class WeightQuantization {
 public:
  // `name`: the layer's, which its random numbers follow. `by_row`: each row of the weight has a scale of its own,
  // whatever the rule's groups.
  WeightQuantization(const Rule& rule, std::string name, bool by_row);

  const Rule& rule() const { return rule_; }
  // Returns the weight's values at the bits of the step that runs, once the rule has begun; gradients go to the weight
  // as they are.
  at::Tensor apply(const at::Tensor& weight, const Progress& progress) const;
  // Returns the values that a trained weight is left with, at target bits. No graph.
  at::Tensor final_values(const at::Tensor& weight) const;

 private:
  int64_t groups_of(const at::Tensor& weight) const { return by_row_ ? weight.size(0) : rule_.groups; }

  Rule rule_;
  std::string name_;
  bool by_row_;
};

// The rule of activation_quantization of a layer, by which its inputs are quantised: each row in its own range, or all
// in a static range that follows the inputs of training steps.
class InputQuantization {
 public:
  // Registers a static range in `keeper`, on `device`, as the buffer "activation_range".
  InputQuantization(const Rule& rule, torch::nn::Module& keeper, at::Device device);

  const Rule& rule() const { return rule_; }
  // Returns the input's values in the layer; gradients go to the input as they are. A static range that is not known,
  // before the first training step, leaves them as they are.
  at::Tensor apply(const at::Tensor& input) const;

  // The three serve static ranges alone. observe() looks at an input of a training step. take_observed() returns
  // {-minimum, maximum} of what this rank has seen since its last call, float32, -inf where nothing. follow() moves the
  // range by what all ranks saw.
  void observe(const at::Tensor& input);
  at::Tensor take_observed();
  void follow(const at::Tensor& observed);

 private:
  at::Tensor range() const;  // float32 [2]
  void set_range(const at::Tensor& range);

  Rule rule_;
  // A buffer [2, 2]: minimum and maximum, and below each what the buffer's dtype left of it. Their sum is the range,
  // also after a cast of the model.
  at::Tensor range_;
  at::Tensor observed_;  // undefined: nothing
};

}  // namespace ds::model_compression
