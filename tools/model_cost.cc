#include "tools/model_cost.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

#include "core/check.h"
#include "pipeline/schedule/stage_partition.h"
#include "tools/flag_limits.h"

namespace ds::tool {
namespace {

constexpr const char* kTiedKey = "wte";

void require_count(const char* flag, int64_t value, int64_t most) {
  require<ConfigError>(value >= 1 && value <= most, flag, ": expected a whole number from 1 to ", most, ", found ",
                       value);
}

// The number of parameters, as a double because no model overflows it.
double parameters_of(const GptShape& shape) {
  const auto hidden = static_cast<double>(shape.hidden);
  const double block = 12 * hidden * hidden + 13 * hidden;
  const double embeddings =
      (shape.tied ? 1 : 2) * static_cast<double>(shape.vocab) + static_cast<double>(shape.seq_len);
  return embeddings * hidden + static_cast<double>(shape.layers) * block + 2 * hidden;
}

void require_model(const GptShape& shape, int64_t micro_batch) {
  require_count("--layers", shape.layers, kMostLayers);
  for (const auto& [flag, value] : {std::pair{"--hidden", shape.hidden}, std::pair{"--heads", shape.heads},
                                    std::pair{"--seq_len", shape.seq_len}, std::pair{"--vocab", shape.vocab}}) {
    require_count(flag, value, kMostWidth);
  }
  require<ConfigError>(shape.hidden % shape.heads == 0, "--hidden ", shape.hidden, " does not divide by --heads ",
                       shape.heads, "; every head takes hidden / heads channels");
  const double parameters = parameters_of(shape);
  require<ConfigError>(parameters <= static_cast<double>(kMostParameters), "ds-tool simulate: --layers ", shape.layers,
                       ", --hidden ", shape.hidden, ", --seq_len ", shape.seq_len, " and --vocab ", shape.vocab,
                       ": expected a model of at most ", kMostParameters, " parameters, found ", parameters);
  require(micro_batch > 0, "gpt_layers: expected a positive micro-batch, found ", micro_batch);
}

int64_t share_of(int64_t elements, int64_t ranks) { return (elements + ranks - 1) / ranks; }

// See gpt_layers(). At 16 bits 34 = 10 + 24 and 5; the 10 are of norms, residuals and their masks.
double kept_by_block(const GptShape& shape, double tokens, double element_bytes, const TensorRanks& tensor) {
  const auto ranks = static_cast<double>(tensor.count);
  const double between = (4 * element_bytes + 2) / (tensor.sequence_parallel ? ranks : 1);
  const double of_tokens = (between + 12 * element_bytes / ranks) * tokens * static_cast<double>(shape.hidden);
  const double scores = tokens * static_cast<double>(shape.heads) * static_cast<double>(shape.seq_len) / ranks;
  return of_tokens + (shape.flash_attention ? 0 : (2 * element_bytes + 1) * scores);
}

// Norms and the biases of outputs are whole on each rank.
int64_t block_parameters(const GptShape& shape, int64_t ranks) {
  const int64_t cut = 12 * shape.hidden * shape.hidden + 7 * shape.hidden;
  return share_of(cut, ranks) + 6 * shape.hidden;
}

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
  // The most operations that finding the balance may take.
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

std::vector<LayerCost> gpt_layers(const GptShape& shape, int64_t micro_batch, int64_t element_bytes,
                                  const TensorRanks& tensor) {
  require_model(shape, micro_batch);
  constexpr double kScoreBytes = 4;  // float32
  const double tokens = static_cast<double>(micro_batch) * static_cast<double>(shape.seq_len);
  const auto bytes = static_cast<double>(element_bytes);
  const auto hidden = static_cast<double>(shape.hidden);
  const auto ranks = static_cast<double>(tensor.count);
  const bool shared = tensor.count > 1;
  const double stream = tokens * hidden * bytes;  // between layers
  const double kept_stream = stream / (tensor.sequence_parallel ? ranks : 1);
  const auto multiplied = [&](int64_t parameters) { return 2 * static_cast<double>(parameters) * tokens / ranks; };
  const int64_t embedding = shape.vocab * shape.hidden;
  const int64_t block = 12 * shape.hidden * shape.hidden + 13 * shape.hidden;

  std::vector<LayerCost> layers;
  layers.push_back({.name = "wte",
                    .type = "gpt::Embedding",
                    .parameters = share_of(embedding, tensor.count),
                    .output_bytes = stream,
                    .tied = shape.tied ? kTiedKey : "",
                    .summed_bytes = stream,
                    .forward_sums = shared ? 1 : 0});
  layers.push_back({.name = "wpe",
                    .type = "gpt::Embedding",
                    .parameters = shape.seq_len * shape.hidden,
                    .output_bytes = stream,
                    .tied = ""});
  for (int64_t i = 0; i < shape.layers; ++i) {
    layers.push_back(
        {.name = cat("h.", i),
         .type = "gpt::Block",
         .parameters = block_parameters(shape, tensor.count),
         .forward_flops = multiplied(block) + 4 * static_cast<double>(shape.seq_len) * hidden * tokens / ranks,
         .kept_bytes = kept_by_block(shape, tokens, bytes, tensor),
         .output_bytes = stream,
         .tied = "",
         .summed_bytes = stream,
         .forward_sums = shared ? 2 : 0,
         .backward_sums = shared ? 2 : 0});
  }
  layers.push_back({.name = "ln_f",
                    .type = "gpt::LayerNorm",
                    .parameters = 2 * shape.hidden,
                    .forward_flops = 2 * static_cast<double>(2 * shape.hidden) * tokens,
                    .kept_bytes = kept_stream,
                    .output_bytes = stream,
                    .tied = ""});
  const double scores = tokens * static_cast<double>(shape.vocab) / ranks;
  layers.push_back({.name = shape.tied ? "wte" : "head",
                    .type = shape.tied ? "gpt::Embedding" : "gpt::Linear",
                    .parameters = share_of(embedding, tensor.count),
                    .forward_flops = multiplied(embedding),
                    .kept_bytes = stream + kScoreBytes * scores,
                    .output_bytes = scores * bytes,
                    .tied = shape.tied ? kTiedKey : "",
                    .summed_bytes = stream,
                    .backward_sums = shared ? 1 : 0});
  return layers;
}

std::vector<LayerCost> equal_layers(const PlainModel& model, const TensorRanks& tensor) {
  require_count("--layers", model.layers, kMostLayers);
  require_count("--parameters", model.parameters, kMostParameters);
  const auto count = static_cast<double>(model.layers);
  const int sums = tensor.count > 1 ? 2 : 0;
  std::vector<LayerCost> layers;
  for (int64_t i = 0; i < model.layers; ++i) {
    layers.push_back(
        {.name = cat(i),
         .type = "layer",
         .parameters =
             share_of(model.parameters / model.layers + (i < model.parameters % model.layers ? 1 : 0), tensor.count),
         .forward_flops = model.flops / count / static_cast<double>(tensor.count),
         .kept_bytes = model.activation_bytes / count,
         .output_bytes = model.output_bytes,
         .tied = "",
         .summed_bytes = model.output_bytes,
         .forward_sums = sums,
         .backward_sums = sums});
  }
  return layers;
}

int64_t count_parameters(const std::vector<LayerCost>& layers) {
  std::set<std::string> keys;
  int64_t sum = 0;
  for (const LayerCost& layer : layers) {
    if (layer.tied.empty() || keys.insert(layer.tied).second) sum += layer.parameters;
  }
  return sum;
}

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
