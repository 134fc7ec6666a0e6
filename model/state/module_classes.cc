#include "model/state/module_classes.h"

#include <c10/util/Type.h>

#include <algorithm>
#include <array>
#include <set>
#include <string_view>
#include <typeinfo>

#include "core/check.h"
#include "core/text.h"
#include "model/state/tensor_parts.h"

namespace ds::engine {
namespace {

constexpr std::string_view kTorch = "torch::nn::";

// With parameters; a model need not have them.
constexpr std::array<std::string_view, 31> kLayersOfTorch = {"Bilinear",
                                                             "BatchNorm1d",
                                                             "BatchNorm2d",
                                                             "BatchNorm3d",
                                                             "Conv1d",
                                                             "Conv2d",
                                                             "Conv3d",
                                                             "ConvTranspose1d",
                                                             "ConvTranspose2d",
                                                             "ConvTranspose3d",
                                                             "Embedding",
                                                             "EmbeddingBag",
                                                             "GRU",
                                                             "GRUCell",
                                                             "GroupNorm",
                                                             "InstanceNorm1d",
                                                             "InstanceNorm2d",
                                                             "InstanceNorm3d",
                                                             "LSTM",
                                                             "LSTMCell",
                                                             "LayerNorm",
                                                             "Linear",
                                                             "MultiheadAttention",
                                                             "PReLU",
                                                             "RNN",
                                                             "RNNCell",
                                                             "RMSNorm",
                                                             "Transformer",
                                                             "TransformerDecoder",
                                                             "TransformerDecoderLayer",
                                                             "TransformerEncoderLayer"};

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
}

std::string_view last_part(std::string_view name) {
  const size_t colons = name.rfind("::");
  return colons == std::string_view::npos ? name : name.substr(colons + 2);
}

// As class_of() spells it.
std::string in_cpp(std::string name) {
  replace_all(name, ".", "::");
  replace_all(name, "(anonymous namespace)::", "");
  if (name.ends_with("Impl")) name.resize(name.size() - 4);
  if (name.starts_with("torch::nn::modules::")) name = std::string(kTorch) + std::string(last_part(name));
  return name;
}

bool means(const std::string& name, const std::string& found) {
  return name == found || (name.find("::") == std::string::npos && name == last_part(found));
}

bool is_layer_of_torch(const std::string& name) {
  const bool of_torch = name.starts_with(kTorch) || name.find("::") == std::string::npos;
  return of_torch && std::find(kLayersOfTorch.begin(), kLayersOfTorch.end(), last_part(name)) != kLayersOfTorch.end();
}

}  // namespace

std::string class_of(const torch::nn::Module& module) { return in_cpp(c10::demangle(typeid(module).name())); }

std::unordered_set<const void*> tensors_of_classes(const torch::nn::Module& module,
                                                   const std::vector<std::string>& names, const std::string& key) {
  std::vector<std::string> wanted;
  for (const std::string& name : names) wanted.push_back(in_cpp(name));
  std::set<std::string> found;
  std::unordered_set<const void*> tensors;
  for (const std::shared_ptr<torch::nn::Module>& layer : module.modules()) {
    const std::string own = class_of(*layer);
    found.insert(own);
    if (std::none_of(wanted.begin(), wanted.end(), [&](const auto& name) { return means(name, own); })) continue;
    for (const auto& item : layer->named_parameters(/*recurse=*/false)) {
      tensors.insert(trained_tensor(item.value()).unsafeGetTensorImpl());
    }
  }
  for (size_t i = 0; i < names.size(); ++i) {
    const auto is_it = [&](const std::string& own) { return means(wanted[i], own); };
    if (is_layer_of_torch(wanted[i]) || std::any_of(found.begin(), found.end(), is_it)) continue;
    std::string classes;
    for (const std::string& own : found) classes += cat(classes.empty() ? "" : ", ", own);
    throw ConfigError(cat(key, "/", i, ": expected the class of a module of the model, or a layer of LibTorch as ",
                          "\"torch.nn.Linear\", found \"", names[i], "\". Classes of the model: ", classes));
  }
  return tensors;
}

}  // namespace ds::engine
