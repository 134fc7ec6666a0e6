// Linear layers that compute on FP8: output and the input's gradient on FP8, the weight's gradient on what the layer
// was given, or on FP8 too. Operators find a layer by its weight. LibTorch's own Linear calls addmm and matmul with its
// weight transposed, others call linear; Conv1D of Hugging Face calls addmm with its weight as it is, [in, out].
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "layers/fp8/scaling.h"

namespace ds::fp8 {

// A Linear layer of a module.
struct NamedLinear {
  std::vector<std::string> names;  // more than one: layers that share the weight
  at::Tensor weight;               // [out, in]
  bool inputs_first = false;       // it is [in, out], as that of Conv1D

  int64_t inputs() const { return weight.size(inputs_first ? 0 : 1); }
  int64_t outputs() const { return weight.size(inputs_first ? 1 : 0); }
  const std::string& name() const { return names.front(); }
};

// Returns torch::nn::Linear, and modules of classes whose name has "Linear" in it (Python's class in an exported model)
// or is "Conv1D" (Hugging Face's, as in GPT-2) and that have a parameter "weight" of two dimensions, in the module's
// order. A layer that has the weight of one before is another name of that one.
std::vector<NamedLinear> linears_of(torch::nn::Module& module);

// An FP8 layer, as operators find it by its weight.
struct Fp8Layer {
  std::string name;
  int64_t index = 0;  // among the layers of `scaling`
  bool inputs_first = false;
  std::weak_ptr<Scaling> scaling;
};

// From now on these layers, those of `scaling` in order, compute on FP8, as long as it lives. Puts our kernels in front
// of LibTorch's, for the rest of the process; other layers are computed by these as before. Any thread.
void set_layers(const std::vector<NamedLinear>& layers, const std::shared_ptr<Scaling>& scaling);

// Null: LibTorch computes it. Any thread.
std::shared_ptr<const Fp8Layer> find_layer(const at::Tensor& weight);

}  // namespace ds::fp8
