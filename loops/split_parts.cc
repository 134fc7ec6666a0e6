#include "loops/split_parts.h"

#include <utility>
#include <vector>

#include "core/check.h"

namespace ds::loops {

ShardRanks ranks_of(const torch::nn::Module& module, const FullyShardOptions& options) {
  const std::vector<at::Tensor> parameters = module.parameters();
  require(!parameters.empty(), "fully_shard: expected a module with parameters, found none in ", module.name());
  const c10::Device device = parameters.front().device();
  const auto axis = tensor_axis_of(module);
  require<ConfigError>(!axis || !options.init, "fully_shard: .init: expected none for a module that ",
                       "parallelize_module has split, which has sliced nothing of it. Leave it out");
  ShardRanks ranks = shard_ranks(options, device, axis ? &axis->communicator() : nullptr);
  require<ConfigError>(!axis || ranks.device == device, "fully_shard: .device: expected ", device.str(),
                       ", where the parts of the module are that parallelize_module has split, found ",
                       ranks.device.str(), ". Move the module before it is split");
  return ranks;
}

std::shared_ptr<parallel::Axis> tensor_axis_of(const torch::nn::Module& module) {
  std::shared_ptr<parallel::Axis> axis;
  std::string first;
  for (const auto& item : module.named_parameters()) {
    if (!is_split(item.value())) continue;
    std::shared_ptr<parallel::Axis> own = parallel::axis_of(placement_of(item.value()));
    require(!axis || axis == own, "fully_shard: parameters ", first, " and ", item.key(), ": expected one axis, over ",
            "which one call of parallelize_module has split both, found two");
    if (axis) continue;
    axis = std::move(own);
    first = item.key();
  }
  return axis;
}

std::unique_ptr<engine::TensorParts> tensor_parts_of(const torch::nn::Module& module, const ShardRanks& ranks) {
  if (!ranks.tensor) return nullptr;
  auto parts = std::make_unique<engine::TensorParts>();
  parts->ranks = ranks.tensor;
  const int first = ranks.world->rank() - ranks.tensor->rank();
  for (int rank = 0; rank < ranks.tensor->size(); ++rank) parts->world_ranks.push_back(first + rank);
  parts->split.axis = tensor_axis_of(module);
  for (const auto& item : module.named_parameters()) {
    if (!is_split(item.value())) continue;
    parts->sums_wholes = parts->sums_wholes || placement_of(item.value()).summed;
    parts->parameters.push_back({item.key(), item.value(), leaf_of(item.value())});
  }
  return parts;
}

std::string split_text(const torch::nn::Module& module) {
  if (!tensor_axis_of(module)) return {};
  std::string text;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& parameter = item.value();
    text += cat("parameter ", item.key(), '\t', parameter.scalar_type(), ' ', parameter.sizes());
    if (is_split(parameter)) {
      const Placement& placement = placement_of(parameter);
      if (placement.cut) {
        text += cat(", cut along dimension ", placement.cut->dim, ", blocks ", at::IntArrayRef(placement.cut->blocks),
                    ", grain ", placement.cut->grain);
      }
      if (placement.summed) text += ", summed";
    }
    text += '\n';
  }
  return text;
}

}  // namespace ds::loops
