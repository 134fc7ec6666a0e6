// A student with fewer layers begins with some of its teacher's.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ds::model_compression {

// As compression_training.layer_reduction has it.
struct LayerReduction {
  std::string prefix;                      // of the layers: "bert.encoder.layer" for "bert.encoder.layer.0" ...
  std::vector<int64_t> teacher_layers;     // of the student's layers, in their order
  std::optional<int64_t> kept_layers;      // how many layers the student has
  std::vector<std::string> other_modules;  // that get the teacher's values under the same name
};

// Parameters and buffers are copied. Throws ConfigError with the json path, before any change, for a module that either
// model lacks, for other shapes, and for a student with other layers than the list has.
void reduce_layers(torch::nn::Module& student, torch::nn::Module& teacher, const LayerReduction& reduction);

}  // namespace ds::model_compression
