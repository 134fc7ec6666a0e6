#include "layers/batch_norm/converted_layers.h"

#include <torch/nn/modules/batchnorm.h>

#include <mutex>
#include <numeric>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "layers/batch_norm/sync_batch_norm.h"

namespace ds::norm {
namespace {

template <class Layer>
std::optional<LayerTensors> tensors_as(torch::nn::Module& module) {
  auto* const layer = dynamic_cast<Layer*>(&module);
  if (layer == nullptr) return std::nullopt;
  return LayerTensors{layer->weight, layer->bias, layer->running_mean, layer->running_var, layer->num_batches_tracked};
}

std::optional<LayerTensors> tensors_if_norm(torch::nn::Module& module) {
  if (auto found = tensors_as<torch::nn::BatchNorm2dImpl>(module)) return found;
  if (auto found = tensors_as<torch::nn::BatchNorm1dImpl>(module)) return found;
  return tensors_as<torch::nn::BatchNorm3dImpl>(module);
}

// By the identity of weight and running mean, which to(), set_data() and an engine keep.
struct Table {
  std::shared_mutex mutex;
  std::unordered_map<const at::TensorImpl*, std::shared_ptr<const ConvertedLayer>> layers;

  static Table& of_process() {
    static Table table;
    return table;
  }
  void add(const at::Tensor& tensor, const std::shared_ptr<const ConvertedLayer>& layer) {
    if (tensor.defined()) layers[tensor.unsafeGetTensorImpl()] = layer;
  }
};

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
  Table& table = Table::of_process();
  const std::unique_lock lock(table.mutex);
  std::erase_if(table.layers, [](const auto& entry) { return entry.second->module.expired(); });
  for (const NamedLayer& layer : layers) {
    const LayerTensors tensors = tensors_of(*layer.module);
    const auto converted =
        std::make_shared<const ConvertedLayer>(ConvertedLayer{.name = layer.name,
                                                              .module = layer.module,
                                                              .group = group,
                                                              .kept = owner == GroupOwner::kLayers ? group : nullptr,
                                                              .has_ranks = group != nullptr});
    table.add(tensors.weight, converted);
    table.add(tensors.running_mean, converted);
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
  Table& table = Table::of_process();
  const std::shared_lock lock(table.mutex);
  for (const at::Tensor* tensor : {&weight, &running_mean}) {
    if (!tensor->defined()) continue;
    const auto found = table.layers.find(tensor->unsafeGetTensorImpl());
    if (found == table.layers.end()) continue;
    // A tensor may lie where one of a module that is gone has been, or one that its module has replaced.
    const std::shared_ptr<torch::nn::Module> module = found->second->module.lock();
    if (!module) continue;
    const LayerTensors own = tensors_of(*module);
    if (own.weight.is_same(*tensor) || own.running_mean.is_same(*tensor)) return found->second;
  }
  return nullptr;
}

}  // namespace ds::norm
