#include "tools/stage_layout.h"

#include <algorithm>
#include <string_view>

#include "core/check.h"
#include "pipeline/schedule/stage_partition.h"

namespace ds::tool {
namespace {

std::vector<double> weights_of_layers(const std::vector<LayerCost>& layers, const std::string& method) {
  constexpr std::string_view kType = "type:";
  std::vector<double> weights;
  if (method.starts_with(kType)) {
    std::vector<std::string> types;
    for (const LayerCost& layer : layers) types.push_back(layer.type);
    return pipeline::weights_of_type(types, method.substr(kType.size()));
  }
  const bool by_time = method == "profile";
  require<ConfigError>(by_time || method == "parameters" || method == "best", "pipeline.partition: expected ",
                       "\"parameters\", \"uniform\", \"type:REGEX\" or \"profile\", found \"", method, "\"");
  for (const LayerCost& layer : layers) {
    weights.push_back(by_time ? layer.forward_flops : static_cast<double>(layer.parameters));
  }
  return weights;
}

pipeline::StageBounds bounds_of(const std::vector<LayerCost>& layers, int stages, const std::string& method) {
  const auto count = static_cast<int>(layers.size());
  if (stages == 1) return {0, count};
  if (method == "uniform") return pipeline::partition_uniform(count, stages);
  // What finding the balance takes.
  constexpr double kMostChoices = 0x1p31;
  require<ConfigError>(static_cast<double>(count) * count * stages <= kMostChoices,
                       "ds-tool simulate: pipeline.partition ", "\"", method,
                       "\": expected at most 2^31 for layers^2 x stages, found ", count, " layers and ", stages,
                       " stages; use \"uniform\", or fewer layers");
  return pipeline::partition_balanced(weights_of_layers(layers, method), stages);
}

// Regions begin at the stage's first layer.
void add_activations(const std::vector<LayerCost>& layers, int64_t interval, StageLayout& stage) {
  double region = 0;
  for (int i = stage.begin; i < stage.end; ++i) {
    const double kept = layers[static_cast<size_t>(i)].kept_bytes;
    if (interval == 0) {
      stage.kept_bytes += kept;
      continue;
    }
    const bool first = (i - stage.begin) % interval == 0;
    if (first && i > 0) stage.kept_bytes += layers[static_cast<size_t>(i) - 1].output_bytes;
    region = (first ? 0 : region) + kept;
    stage.recomputed_bytes = std::max(stage.recomputed_bytes, region);
  }
}

}  // namespace

std::vector<StageLayout> cut_into_stages(const std::vector<LayerCost>& layers, const pipeline::Schedule& schedule,
                                         const std::string& partition, int64_t interval) {
  const pipeline::StageBounds bounds = bounds_of(layers, schedule.stages(), partition);
  std::vector<StageLayout> stages;
  for (size_t s = 0; s < schedule.rank_of.size(); ++s) {
    StageLayout stage{.begin = bounds[s], .end = bounds[s + 1], .rank = schedule.rank_of[s]};
    for (int i = stage.begin; i < stage.end; ++i) {
      stage.parameters += layers[static_cast<size_t>(i)].parameters;
      stage.forward_flops += layers[static_cast<size_t>(i)].forward_flops;
    }
    stage.output_bytes = layers[static_cast<size_t>(stage.end) - 1].output_bytes;
    add_activations(layers, interval, stage);
    stages.push_back(stage);
  }
  return stages;
}

}  // namespace ds::tool
