// The model that training with compression leaves: pruned and quantised values, without the dimensions that were pruned
// away, and without what the methods kept beside the weights.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <utility>
#include <vector>

#include "layers/compressed/compressed_model.h"

namespace ds::model_compression {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Of whole parameters and buffers under the module's names; values are copied where they change. Throws UsageError for
// a method that has not begun, and where related layers do not fit.
NamedTensors small_state(const CompressedModel& model, NamedTensors state);

// Gives parameters and buffers these values, with their shapes, and layers the sizes that follow. Tensors keep their
// identity and requires_grad, and lose their gradients. Throws UsageError, before any change, when names differ.
void take_state(torch::nn::Module& module, const NamedTensors& state);

// Takes away what methods have registered in the layers.
void drop_method_tensors(const CompressedModel& model);

}  // namespace ds::model_compression
