#include "layers/fp8/linear_table.h"

#include <torch/nn/modules/linear.h>

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "core/check.h"
#include "layers/fp8/linear.h"

namespace ds::fp8 {
namespace {

// By the identity of the weight, which to(), set_data() and an engine keep.
struct LayerTable {
  std::shared_mutex mutex;
  std::unordered_map<const at::TensorImpl*, std::shared_ptr<const Fp8Layer>> layers;

  static LayerTable& of_process() {
    static LayerTable table;
    return table;
  }
};

// The class, without namespaces.
bool is_named_linear(const torch::nn::Module& module) {
  const std::string& name = module.name();
  const size_t scope = name.rfind("::");
  return name.find("Linear", scope == std::string::npos ? 0 : scope) != std::string::npos;
}

// Undefined: it is none.
at::Tensor weight_if_linear(const torch::nn::Module& module) {
  const bool is_linear = dynamic_cast<const torch::nn::LinearImpl*>(&module) != nullptr || is_named_linear(module);
  if (!is_linear) return {};
  const auto parameters = module.named_parameters(/*recurse=*/false);
  const at::Tensor* const weight = parameters.find("weight");
  return weight != nullptr && weight->dim() == 2 ? *weight : at::Tensor();
}

}  // namespace

std::vector<NamedLinear> linears_of(torch::nn::Module& module) {
  std::vector<NamedLinear> result;
  std::unordered_map<const at::TensorImpl*, size_t> places;
  for (const auto& item : module.named_modules("", /*include_self=*/true)) {
    at::Tensor weight = weight_if_linear(*item.value());
    if (!weight.defined()) continue;
    const auto [place, is_new] = places.emplace(weight.unsafeGetTensorImpl(), result.size());
    if (is_new) result.push_back({{}, std::move(weight)});
    result[place->second].names.push_back(item.key().empty() ? "itself" : item.key());
  }
  return result;
}

void set_layers(const std::vector<NamedLinear>& layers, const std::shared_ptr<Scaling>& scaling) {
  ensure(layers.size() == scaling->layers().size(), "scales are of these layers");
  if (layers.empty()) return;
  register_fp8_linear();
  LayerTable& table = LayerTable::of_process();
  const std::unique_lock lock(table.mutex);
  std::erase_if(table.layers,
                [](const auto& entry) { return entry.second->weight.expired() || entry.second->scaling.expired(); });
  for (size_t i = 0; i < layers.size(); ++i) {
    const at::Tensor& weight = layers[i].weight;
    table.layers[weight.unsafeGetTensorImpl()] = std::make_shared<const Fp8Layer>(
        Fp8Layer{layers[i].name(), static_cast<int64_t>(i), Fp8Layer::Weak(weight.getIntrusivePtr()), scaling});
  }
}

std::shared_ptr<const Fp8Layer> find_layer(const at::Tensor& weight) {
  LayerTable& table = LayerTable::of_process();
  const std::shared_lock lock(table.mutex);
  const auto found = table.layers.find(weight.unsafeGetTensorImpl());
  if (found == table.layers.end()) return nullptr;
  // A tensor may lie where the weight of a model that is gone has been.
  return found->second->weight.expired() ? nullptr : found->second;
}

}  // namespace ds::fp8
