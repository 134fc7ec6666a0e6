#include "lora.h"

#include <dsengine/errors.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <regex>

#include "../gpt/check.h"

namespace llama {
namespace {

namespace fs = std::filesystem;
using gpt::cat;
using gpt::require;
using nlohmann::json;

constexpr const char* kAllLinear = "all-linear";

std::vector<std::string> linear_layers(const LlamaConfig& config, bool with_head) {
  std::vector<std::string> names;
  for (int64_t i = 0; i < config.layers; ++i) {
    for (const char* part : {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                             "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}) {
      names.push_back(cat("model.layers.", i, ".", part));
    }
  }
  if (with_head && !config.tie_embeddings) names.emplace_back("lm_head");
  return names;
}

bool is_off(const json& value) {
  return value.is_null() || value == false || value == "none" ||
         ((value.is_object() || value.is_array()) && value.empty());
}

// Keys of PEFT that change what an adapter computes, or what is trained beside it.
void require_plain(const json& config, const std::string& where) {
  const std::string type = config.value("peft_type", json("LORA")).dump();
  require<ds::ConfigError>(type == "\"LORA\"", where, ": peft_type: expected \"LORA\", found ", type);
  for (const char* key :
       {"use_dora", "use_qalora", "use_bdlora", "bias", "lora_bias", "fan_in_fan_out", "modules_to_save",
        "rank_pattern", "alpha_pattern", "layers_to_transform", "layer_replication", "exclude_modules",
        "target_parameters", "trainable_token_indices", "alora_invocation_tokens", "arrow_config", "kasa_config",
        "velora_config", "monteclora_config"}) {
    const json value = config.value(key, json());
    require<ds::ConfigError>(is_off(value), where, ": ", key, ": expected null, false or \"none\", found ",
                             value.dump(), ", which this example does not compute");
  }
}

// The layers whose full names a regular expression matches, as PEFT reads a text that is no list.
std::set<std::string> match_targets(const LlamaConfig& config, const std::string& pattern, const std::string& where) {
  std::regex expression;
  try {
    expression = std::regex(pattern);
  } catch (const std::regex_error& error) {
    throw ds::ConfigError(cat(where, ": target_modules: \"", pattern, "\" is no regular expression: ", error.what()));
  }
  std::set<std::string> found;
  for (const std::string& name : linear_layers(config, /*with_head=*/true)) {
    if (std::regex_match(name, expression)) found.insert(name);
  }
  require<ds::ConfigError>(!found.empty(), where, ": target_modules: no linear layer's name matches \"", pattern, "\"");
  return found;
}

}  // namespace

double LoraConfig::scale() const {
  const auto size = static_cast<double>(rank);
  return alpha / (rank_stabilized ? std::sqrt(size) : size);
}

std::set<std::string> find_targets(const LlamaConfig& config, const std::vector<std::string>& patterns) {
  std::set<std::string> found;
  for (const std::string& pattern : patterns) {
    bool any = false;
    for (const std::string& name : linear_layers(config, /*with_head=*/pattern != kAllLinear)) {
      if (pattern != kAllLinear && name != pattern && !name.ends_with(cat(".", pattern))) continue;
      found.insert(name);
      any = true;
    }
    require<ds::ConfigError>(any, "LoRA targets: no linear layer's name is or ends with \"", pattern,
                             "\"; there are q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, "
                             "down_proj, and lm_head where it is not tied");
  }
  return found;
}

LoraConfig read_lora(const LlamaConfig& config, const std::string& folder) {
  const std::string path = (fs::path(folder) / "adapter_config.json").string();
  const json given = read_json(path);
  require_plain(given, path);
  const json rank = given.value("r", json(8));
  require<ds::ConfigError>(rank.is_number_integer() && rank > 0, path, ": r: expected an integer above 0, found ",
                           rank.dump());
  const json alpha = given.value("lora_alpha", json(8));
  require<ds::ConfigError>(alpha.is_number(), path, ": lora_alpha: expected a number, found ", alpha.dump());
  const json dropout = given.value("lora_dropout", json(0.0));
  require<ds::ConfigError>(dropout.is_number() && dropout >= 0 && dropout < 1, path,
                           ": lora_dropout: expected a number in [0, 1), found ", dropout.dump());
  LoraConfig lora{.rank = rank, .alpha = alpha, .dropout = dropout, .targets = {}};
  lora.rank_stabilized = given.value("use_rslora", json(false)) == true;
  const json targets = given.value("target_modules", json());
  if (targets.is_string() && targets != kAllLinear) {
    lora.targets = match_targets(config, targets.get<std::string>(), path);
    return lora;
  }
  require<ds::ConfigError>(targets.is_string() || targets.is_array(), path,
                           ": target_modules: expected a list of names or a text, found ", targets.dump());
  lora.targets = find_targets(
      config, targets.is_string() ? std::vector<std::string>{kAllLinear} : targets.get<std::vector<std::string>>());
  return lora;
}

void write_lora(const LoraConfig& lora, const std::string& base, const std::string& folder) {
  const json config = {{"peft_type", "LORA"},
                       {"task_type", "CAUSAL_LM"},
                       {"base_model_name_or_path", base},
                       {"r", lora.rank},
                       {"lora_alpha", lora.alpha},
                       {"lora_dropout", lora.dropout},
                       {"use_rslora", lora.rank_stabilized},
                       {"target_modules", lora.targets},
                       {"bias", "none"},
                       {"fan_in_fan_out", false},
                       {"inference_mode", true},
                       {"init_lora_weights", true},
                       {"modules_to_save", nullptr}};
  const std::string path = (fs::path(folder) / "adapter_config.json").string();
  std::ofstream file(path);
  file << config.dump(2) << '\n';
  file.close();
  require<ds::IoError>(file.good(), path, ": cannot be written");
}

std::string adapter_file(const std::string& folder) {
  return (fs::path(folder) / "adapter_model.safetensors").string();
}

std::string adapter_name(const std::string& parameter) { return cat("base_model.model.", parameter); }

}  // namespace llama
