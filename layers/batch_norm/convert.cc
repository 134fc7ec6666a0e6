#include "dsengine/sync_batch_norm.h"
#include "layers/batch_norm/converted_layers.h"

namespace ds {
namespace {

std::vector<std::string> names_of(const std::vector<norm::NamedLayer>& layers) {
  std::vector<std::string> names;
  for (const norm::NamedLayer& layer : layers) names.push_back(layer.name);
  return names;
}

}  // namespace

std::vector<std::string> convert_sync_batchnorm(torch::nn::Module& module, comm::Communicator& group) {
  const std::vector<norm::NamedLayer> layers = norm::batch_norms_of(module);
  norm::convert_layers(layers, norm::group_for_layers(group), norm::GroupOwner::kLayers);
  return names_of(layers);
}

std::vector<std::string> convert_sync_batchnorm(torch::nn::Module& module) {
  const std::vector<norm::NamedLayer> layers = norm::batch_norms_of(module);
  norm::convert_layers(layers, nullptr, norm::GroupOwner::kLayers);
  return names_of(layers);
}

}  // namespace ds
