#include "layers/batch_norm/converted_layers.h"

#include <torch/nn/modules/batchnorm.h>

#include <numeric>
#include <optional>
#include <typeinfo>
#include <utility>

#include "core/check.h"
#include "core/tensor_table.h"
#include "dsengine/sync_batch_norm.h"

namespace ds::norm {
namespace {

template <class Layer>
std::optional<LayerTensors> tensors_as(torch::nn::Module& module) {
  auto* const layer = dynamic_cast<Layer*>(&module);
  if (layer == nullptr) return std::nullopt;
  return LayerTensors{layer->weight, layer->bias, layer->running_mean, layer->running_var, layer->num_batches_tracked};
}

// A layer of an exported model (dsengine/exported_model.h): a plain module with what Python registers in a BatchNorm.
std::optional<LayerTensors> tensors_of_plain(torch::nn::Module& module) {
  if (typeid(module) != typeid(torch::nn::Module)) return std::nullopt;
  const auto buffers = module.named_buffers(/*recurse=*/false);
  for (const char* name : {"running_mean", "running_var", "num_batches_tracked"}) {
    if (!buffers.contains(name)) return std::nullopt;
  }
  const auto parameters = module.named_parameters(/*recurse=*/false);
  const auto parameter = [&](const char* name) {
    const at::Tensor* const found = parameters.find(name);
    return found == nullptr ? at::Tensor() : *found;
  };
  return LayerTensors{parameter("weight"), parameter("bias"), buffers["running_mean"], buffers["running_var"],
                      buffers["num_batches_tracked"]};
}

std::optional<LayerTensors> tensors_if_norm(torch::nn::Module& module) {
  if (auto found = tensors_as<torch::nn::BatchNorm2dImpl>(module)) return found;
  if (auto found = tensors_as<torch::nn::BatchNorm1dImpl>(module)) return found;
  if (auto found = tensors_as<torch::nn::BatchNorm3dImpl>(module)) return found;
  return tensors_of_plain(module);
}

// Layers by their weight and by their running mean.
TensorTable<std::shared_ptr<const ConvertedLayer>>& layers_by_tensor() {
  static TensorTable<std::shared_ptr<const ConvertedLayer>> table;
  return table;
}

std::vector<std::string> names_of(const std::vector<NamedLayer>& layers) {
  std::vector<std::string> names;
  for (const NamedLayer& layer : layers) names.push_back(layer.name);
  return names;
}

}  // namespace

std::vector<NamedLayer> batch_norms_of(torch::nn::Module& module) {
  std::vector<NamedLayer> result;
  for (const auto& item : module.named_modules("", /*include_self=*/true)) {
    if (tensors_if_norm(*item.value())) result.push_back({item.key().empty() ? "itself" : item.key(), item.value()});
  }
  return result;
}

LayerTensors tensors_of(torch::nn::Module& layer) {
  auto found = tensors_if_norm(layer);
  ensure(found.has_value(), "only BatchNorm layers are converted");
  return *std::move(found);
}

std::shared_ptr<comm::Communicator> group_for_layers(comm::Communicator& group) {
  std::vector<int> ranks(static_cast<size_t>(group.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return group.new_group(ranks, "sync batch norm");
}

void convert_layers(const std::vector<NamedLayer>& layers, const std::shared_ptr<comm::Communicator>& group,
                    GroupOwner owner) {
  for (const NamedLayer& layer : layers) {
    const LayerTensors tensors = tensors_of(*layer.module);
    require(
        tensors.weight.defined() || tensors.running_mean.defined(), "convert_sync_batchnorm: layer ", layer.name,
        ": expected a weight or running statistics, by which the operator knows the layer, found neither. Construct "
        "it with affine(true) or track_running_stats(true)");
  }
  if (layers.empty()) return;
  register_sync_batch_norm();
  auto& table = layers_by_tensor();
  table.drop([](const auto& layer) { return layer->module.expired(); });
  for (const NamedLayer& layer : layers) {
    const LayerTensors tensors = tensors_of(*layer.module);
    const auto converted =
        std::make_shared<const ConvertedLayer>(ConvertedLayer{.name = layer.name,
                                                              .module = layer.module,
                                                              .group = group,
                                                              .kept = owner == GroupOwner::kLayers ? group : nullptr,
                                                              .has_ranks = group != nullptr});
    for (const at::Tensor& tensor : {tensors.weight, tensors.running_mean}) {
      if (tensor.defined()) table.set(tensor, converted);
    }
  }
}

std::vector<NamedLayer> layers_without_ranks(torch::nn::Module& module) {
  std::vector<NamedLayer> result;
  for (NamedLayer& layer : batch_norms_of(module)) {
    const LayerTensors tensors = tensors_of(*layer.module);
    const auto found = find_converted(tensors.weight, tensors.running_mean);
    // A group that has ended was an engine's, since layers keep one that the program has given.
    if (found && (!found->has_ranks || found->group.expired())) result.push_back(std::move(layer));
  }
  return result;
}

std::shared_ptr<comm::Communicator> give_ranks(const std::vector<NamedLayer>& layers, comm::Communicator& ranks) {
  if (layers.empty()) return nullptr;
  std::shared_ptr<comm::Communicator> group = group_for_layers(ranks);
  convert_layers(layers, group, GroupOwner::kCaller);
  return group;
}

std::shared_ptr<const ConvertedLayer> find_converted(const at::Tensor& weight, const at::Tensor& running_mean) {
  for (const at::Tensor* tensor : {&weight, &running_mean}) {
    if (!tensor->defined()) continue;
    auto found = layers_by_tensor().find(*tensor);
    const std::shared_ptr<torch::nn::Module> module = found ? found->module.lock() : nullptr;
    if (!module) continue;
    // The module may have replaced it.
    const LayerTensors own = tensors_of(*module);
    if (own.weight.is_same(*tensor) || own.running_mean.is_same(*tensor)) return found;
  }
  return nullptr;
}

}  // namespace ds::norm

namespace ds {

std::vector<std::string> convert_sync_batchnorm(torch::nn::Module& module, comm::Communicator& group) {
  const std::vector<norm::NamedLayer> layers = norm::batch_norms_of(module);
  norm::convert_layers(layers, norm::group_for_layers(group), norm::GroupOwner::kLayers);
  return norm::names_of(layers);
}

std::vector<std::string> convert_sync_batchnorm(torch::nn::Module& module) {
  const std::vector<norm::NamedLayer> layers = norm::batch_norms_of(module);
  norm::convert_layers(layers, nullptr, norm::GroupOwner::kLayers);
  return norm::names_of(layers);
}

}  // namespace ds
