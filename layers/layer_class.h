// How a layer's class says that it has its weight.
#pragma once

#include <torch/nn/module.h>

#include <string_view>

namespace ds::layers {

// Returns the class of a module without namespaces. An exported model has Python's classes.
inline std::string_view class_of(const torch::nn::Module& module) {
  const std::string_view name = module.name();
  const size_t scope = name.rfind("::");
  return scope == std::string_view::npos ? name : name.substr(scope + 2);
}

// Whether the weight of two dimensions is [inputs, outputs], as that of Hugging Face's Conv1D (GPT-2), and not the
// other way round, as that of a Linear.
inline bool has_inputs_first(const torch::nn::Module& module) { return class_of(module) == "Conv1D"; }

}  // namespace ds::layers
