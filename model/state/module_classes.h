// Classes of modules by name, as torch_autocast.lower_precision_safe_modules gives them.
#pragma once

#include <torch/nn/module.h>

#include <string>
#include <unordered_set>
#include <vector>

namespace ds::engine {

// "torch::nn::Linear" of a torch::nn::LinearImpl: the class without "Impl", which holders do not have, and without
// "(anonymous namespace)::".
std::string class_of(const torch::nn::Module& module);

// Identities of the tensors that modules of these classes hold, not those of modules inside them or of derived classes.
// Names are C++'s ("torch::nn::Linear", "my::Layer"), Python's ("torch.nn.Linear", "torch.nn.modules.linear.Linear"),
// or without a namespace. Throws ConfigError, with the classes found, for a name that is neither the class of a module
// nor a layer of LibTorch, with `key` before it.
std::unordered_set<const void*> tensors_of_classes(const torch::nn::Module& module,
                                                   const std::vector<std::string>& names, const std::string& key);

}  // namespace ds::engine
