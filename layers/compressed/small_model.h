// Smaller models: the one that training with compression leaves, with pruned and quantised values, without the
// dimensions that were pruned away and without what the methods kept beside the weights; and a student that begins with
// some of its teacher's layers.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "layers/compressed/compressed_model.h"

namespace ds::model_compression {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Makes the small model's state out of full parameters and buffers under the module's names; values are copied where
// they change. Throws UsageError for a method that has not begun, and where related layers do not fit.
NamedTensors small_state(const CompressedModel& model, NamedTensors state);

// Gives parameters and buffers these values, with their shapes, and layers the sizes that follow. Tensors keep their
// identity and requires_grad, and lose their gradients. Throws UsageError, before any change, when names differ.
void take_state(torch::nn::Module& module, const NamedTensors& state);

// Takes away what methods have registered in the layers.
void drop_method_tensors(const CompressedModel& model);

// The config's compression_training.layer_reduction.
struct LayerReduction {
  std::string prefix;                      // of the layers: "bert.encoder.layer" for "bert.encoder.layer.0" ...
  std::vector<int64_t> teacher_layers;     // of the student's layers, in their order
  std::optional<int64_t> kept_layers;      // how many layers the student has
  std::vector<std::string> other_modules;  // that get the teacher's values under the same name
};

// Copies parameters and buffers of the teacher's layers to the student's. Throws ConfigError with the json path, before
// any change, for a module that either model lacks, for other shapes, and for a student with other layers than the list
// has.
void reduce_layers(torch::nn::Module& student, torch::nn::Module& teacher, const LayerReduction& reduction);

}  // namespace ds::model_compression
