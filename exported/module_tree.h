// The modules of an exported program: plain ones under their dotted names in Python, each named by its class there.
#pragma once

#include <torch/nn/module.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>

namespace ds::exported {

// Modules below a root, which outlives the tree. What goes by the class of a module (FP8's layers, types in a profile)
// reads torch::nn::Module::name(), which is Python's class without its package: "Linear".
class ModuleTree {
 public:
  explicit ModuleTree(torch::nn::Module& root) : root_(root) {}

  // Makes the modules of a program, in Python's order. Throws nlohmann's exceptions and IoError for a damaged one.
  void add_modules(const nlohmann::json& program);
  // The class of the module "h.0"; where the program does not say, the last part of its name.
  std::string class_of(const std::string& path) const;
  // The module "h.0" of "h.0.weight", made on the way.
  // The module "h.0" of "h.0.weight", made on the way. Throws IoError for a name of too many parts.
  torch::nn::Module& owner_of(const std::string& name);
  // Register a tensor under its dotted name.
  void add_parameter(const std::string& name, const at::Tensor& value, bool requires_grad) {
    owner_of(name).register_parameter(leaf_of(name), value, requires_grad);
  }
  void add_buffer(const std::string& name, const at::Tensor& value) {
    owner_of(name).register_buffer(leaf_of(name), value);
  }

 private:
  // "weight" of "h.0.weight", and "0" of "h.0".
  static std::string leaf_of(const std::string& name) { return name.substr(name.rfind('.') + 1); }

  torch::nn::Module& root_;
  std::map<std::string, std::string> classes_;         // by name of a module
  std::map<std::string, torch::nn::Module*> modules_;  // by name
};

}  // namespace ds::exported
