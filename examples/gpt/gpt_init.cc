#include "gpt_init.h"

#include <ATen/core/grad_mode.h>
#include <dsengine/checkpoint.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <set>
#include <string_view>

#include "check.h"
#include "splitmix64.h"

namespace gpt {
namespace {

constexpr double kStd = 0.02;

bool is_layer_norm(std::string_view name) { return name.find("ln") != std::string_view::npos; }

void fill_uniform(const at::Tensor& weight, uint64_t first_counter, double std) {
  const auto scale = static_cast<float>(std::numbers::sqrt3 * std);
  auto* values = weight.mutable_data_ptr<float>();
  const int64_t count = weight.numel();
  for (int64_t j = 0; j < count; ++j) {
    const auto u = static_cast<int32_t>(splitmix64(first_counter + static_cast<uint64_t>(j)) >> 40);
    values[j] = static_cast<float>(2 * u - (1 << 24)) * 0x1p-24F * scale;
  }
}

}  // namespace

std::vector<std::string> parameter_names(const GptConfig& config) {
  std::vector<std::string> names = {"wte.weight", "wpe.weight"};
  for (int64_t i = 0; i < config.layers; ++i) {
    for (const char* layer : {"ln1", "attn.qkv", "attn.proj", "ln2", "mlp.fc", "mlp.proj"}) {
      for (const char* parameter : {"weight", "bias"}) names.push_back(cat("h.", i, ".", layer, ".", parameter));
    }
  }
  names.insert(names.end(), {"ln_f.weight", "ln_f.bias"});
  if (!config.tie_embeddings) names.emplace_back("head.weight");
  return names;
}

void initialize_part(torch::nn::Module& part, const std::string& name, const GptConfig& config, uint64_t seed) {
  const at::NoGradGuard no_grad;
  const double projection_std = kStd / std::sqrt(2.0 * static_cast<double>(config.layers));
  const std::vector<std::string> names = parameter_names(config);
  for (const auto& item : part.named_parameters()) {
    const std::string full = name.empty() ? item.key() : name + "." + item.key();
    const auto found = std::find(names.begin(), names.end(), full);
    require(found != names.end(), full, ": expected a parameter of a GPT, one of parameter_names()");
    const auto index = static_cast<uint64_t>(found - names.begin());
    const at::Tensor& parameter = item.value();
    if (full.ends_with("bias")) {
      parameter.zero_();
    } else if (is_layer_norm(full)) {
      parameter.fill_(1.0);
    } else {
      fill_uniform(parameter, (seed << 48) + (index << 32), full.ends_with("proj.weight") ? projection_std : kStd);
    }
  }
}

void initialize_weights(Gpt& model, uint64_t seed) { initialize_part(model, "", model.config(), seed); }

void load_weights(Gpt& model, const std::string& path) {
  const at::NoGradGuard no_grad;
  const auto source = ds::checkpoint::open_weights(path);
  std::set<std::string> used;
  for (const auto& item : model.named_parameters()) {
    const std::string stored = ds::checkpoint::weight_path(item.key());
    require<ds::IoError>(
        source->contains(stored), path, ": no tensor \"", item.key(),
        "\", which this model has; --layers and --tie_embeddings must be those the weights were saved with");
    const at::Tensor saved = source->tensor(stored);
    require<ds::IoError>(saved.sizes() == item.value().sizes(), path, ": \"", item.key(), "\" is ", saved.sizes(),
                         ", this model has ", item.value().sizes(),
                         "; the model flags must be those the weights were saved with");
    item.value().copy_(saved);
    used.insert(stored);
  }
  for (const auto& [stored, info] : source->tensors()) {
    require<ds::IoError>(
        used.contains(stored), path, ": holds \"", ds::checkpoint::name_in("weights/", stored),
        "\", which this model has not; --layers and --tie_embeddings must be those the weights were saved with");
  }
}

int64_t parameter_count(const GptConfig& config) {
  const int64_t width = config.hidden;
  const int64_t block = 12 * width * width + 13 * width;
  const int64_t head = config.tie_embeddings ? 0 : config.vocab * width;
  return (config.vocab + config.seq_len) * width + config.layers * block + 2 * width + head;
}

}  // namespace gpt
