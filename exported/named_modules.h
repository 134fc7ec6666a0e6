// A tree of plain modules made from dotted names, so that parameters have the names that Python gave them.
#pragma once

#include <torch/nn/module.h>

#include <map>
#include <memory>
#include <string>
#include <utility>

namespace ds::exported {

// Makes the modules "h" and "h.0" for the name "h.0.weight". `root` outlives it.
class NamedModules {
 public:
  explicit NamedModules(torch::nn::Module& root) : root_(root) {}

  // The module that has the tensor `name`, made on the way.
  torch::nn::Module* owner_of(const std::string& name) {
    torch::nn::Module* module = &root_;
    size_t begin = 0;
    for (size_t dot = name.find('.'); dot != std::string::npos; begin = dot + 1, dot = name.find('.', begin)) {
      const auto [place, is_new] = modules_.try_emplace(name.substr(0, dot), nullptr);
      if (is_new) {
        const std::string part = name.substr(begin, dot - begin);
        place->second = module->register_module(part, std::make_shared<torch::nn::Module>(part)).get();
      }
      module = place->second;
    }
    return module;
  }
  // Registers a tensor under its dotted name.
  void add_parameter(const std::string& name, const at::Tensor& value, bool requires_grad) {
    owner_of(name)->register_parameter(leaf_of(name), value, requires_grad);
  }
  void add_buffer(const std::string& name, const at::Tensor& value) {
    owner_of(name)->register_buffer(leaf_of(name), value);
  }

 private:
  static std::string leaf_of(const std::string& name) { return name.substr(name.rfind('.') + 1); }

  torch::nn::Module& root_;
  std::map<std::string, torch::nn::Module*> modules_;
};

}  // namespace ds::exported
