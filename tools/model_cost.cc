#include "tools/model_cost.h"

#include <set>
#include <utility>

#include "core/check.h"
#include "tools/flag_limits.h"

namespace ds::tool {
namespace {

constexpr const char* kTiedKey = "wte";

void require_count(const char* flag, int64_t value, int64_t most) {
  require<ConfigError>(value >= 1 && value <= most, flag, ": expected a whole number from 1 to ", most, ", found ",
                       value);
}

// As a double, which no model wraps around.
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

}  // namespace ds::tool
