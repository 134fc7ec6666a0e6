#include "exported/module_tree.h"

#include <algorithm>
#include <memory>
#include <string_view>
#include <unordered_set>

#include "core/check.h"
#include "core/shown_text.h"
#include "exported/archive.h"

namespace ds::exported {
namespace {

using nlohmann::json;

constexpr int kDeepestModule = 100;  // LibTorch follows modules in one another by calls

// Notes the modules of a node's stack, "L__self__,,models.Gpt;L__self__h.0,h.0,models.Block", with their classes.
void note_classes(std::string_view stack, std::map<std::string, std::string>& classes) {
  for (size_t begin = 0; begin < stack.size();) {
    const size_t end = std::min(stack.find(';', begin), stack.size());
    const std::string_view entry = stack.substr(begin, end - begin);
    begin = end + 1;
    const size_t first = entry.find(',');
    const size_t second = first == std::string_view::npos ? first : entry.find(',', first + 1);
    if (second == std::string_view::npos) continue;
    const std::string_view type = entry.substr(second + 1);
    const auto [place, is_new] = classes.try_emplace(std::string(entry.substr(first + 1, second - first - 1)));
    if (is_new) place->second = shown_text(type.substr(type.rfind('.') + 1));
  }
}

void note_classes_of(const json& graph, std::map<std::string, std::string>& classes) {
  std::unordered_set<std::string_view> seen;
  for (const json& node : graph.at("nodes")) {
    const json& metadata = node.at("metadata");
    const auto stack = metadata.find("nn_module_stack");
    if (stack == metadata.end() || !stack->is_string()) continue;
    const std::string_view text = stack->get_ref<const std::string&>();
    if (seen.insert(text).second) note_classes(text, classes);
  }
}

}  // namespace

void ModuleTree::add_modules(const json& program) {
  const json& module = program.at("graph_module");
  note_classes_of(module.at("graph"), classes_);
  for (const json& call : module.at("module_call_graph")) {
    const auto name = call.at("fqn").get<std::string>();
    if (!name.empty() && name.find('@') == std::string::npos) owner_of(name + ".");
  }
}

std::string ModuleTree::class_of(const std::string& path) const {
  const auto type = classes_.find(path);
  return type == classes_.end() ? leaf_of(path) : type->second;
}

torch::nn::Module& ModuleTree::owner_of(const std::string& name) {
  require<IoError>(std::count(name.begin(), name.end(), '.') <= kDeepestModule, "the name \"",
                   lazy([&] { return shown_text(name); }), "\" has more than ", kDeepestModule,
                   " modules in one another", kDamaged);
  torch::nn::Module* module = &root_;
  size_t begin = 0;
  for (size_t dot = name.find('.'); dot != std::string::npos; begin = dot + 1, dot = name.find('.', begin)) {
    const std::string path = name.substr(0, dot);
    const auto [place, is_new] = modules_.try_emplace(path, nullptr);
    if (is_new) {
      const std::string part = name.substr(begin, dot - begin);
      place->second = module->register_module(part, std::make_shared<torch::nn::Module>(class_of(path))).get();
    }
    module = place->second;
  }
  return *module;
}

}  // namespace ds::exported
