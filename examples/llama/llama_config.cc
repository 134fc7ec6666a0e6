#include "llama_config.h"

#include <dsengine/errors.h>

#include <filesystem>
#include <fstream>
#include <utility>

#include "../gpt/check.h"

namespace llama {
namespace {

using gpt::cat;
using gpt::require;
using nlohmann::json;

// The keys of one object of the file. A key that is null counts as absent.
class Keys {
 public:
  Keys(const json& object, std::string where) : object_(object), where_(std::move(where)) {}

  bool has(const std::string& key) const { return object_.contains(key) && !object_.at(key).is_null(); }
  const json& at(const std::string& key) const { return object_.at(key); }
  [[noreturn]] void refuse(const std::string& key, const std::string& expected) const {
    throw ds::ConfigError(
        cat(where_, ": ", key, ": expected ", expected, ", found ", has(key) ? object_.at(key).dump() : "nothing"));
  }
  int64_t integer(const std::string& key, std::optional<int64_t> otherwise = {}, int64_t least = 1) const {
    if (!has(key) && otherwise) return *otherwise;
    if (!has(key) || !at(key).is_number_integer() || at(key).get<int64_t>() < least) {
      refuse(key, cat("an integer of at least ", least));
    }
    return at(key).get<int64_t>();
  }
  double positive(const std::string& key, std::optional<double> otherwise = {}) const {
    if (!has(key) && otherwise) return *otherwise;
    if (!has(key) || !at(key).is_number() || at(key).get<double>() <= 0) refuse(key, "a number above 0");
    return at(key).get<double>();
  }
  bool flag(const std::string& key) const {
    if (!has(key)) return false;
    if (!at(key).is_boolean()) refuse(key, "true or false");
    return at(key).get<bool>();
  }
  std::string text(const std::string& key, const std::string& otherwise) const {
    if (!has(key)) return otherwise;
    if (!at(key).is_string()) refuse(key, "a text");
    return at(key).get<std::string>();
  }
  // A key that changes the computation, with the only value that the model follows; absent counts as it.
  void require_value(const std::string& key, const json& value) const {
    if (has(key) && at(key) != value) refuse(key, cat(value.dump(), ", because the model computes it no other way"));
  }

 private:
  const json& object_;
  std::string where_;
};

// transformers 5 writes rope_parameters, older ones rope_theta and rope_scaling, whose "type" is the oldest spelling.
RopeConfig rope_of(const Keys& keys, const std::string& where, int64_t positions) {
  const std::string section = keys.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  const json given = keys.has(section) ? keys.at(section) : json::object();
  if (!given.is_object()) keys.refuse(section, "an object");
  const Keys scaling(given, cat(where, ": ", section));
  RopeConfig rope{.theta = scaling.positive("rope_theta", keys.positive("rope_theta", 10000.0))};
  scaling.require_value("partial_rotary_factor", 1.0);
  const std::string key = scaling.has("rope_type") ? "rope_type" : "type";
  const std::string type = scaling.text(key, "default");
  if (type == "default") return rope;
  if (type != "linear" && type != "llama3") scaling.refuse(key, "\"default\", \"linear\" or \"llama3\"");
  rope.factor = scaling.positive("factor");
  rope.scaling = RopeConfig::Scaling::kLinear;
  if (type == "linear") return rope;
  rope.scaling = RopeConfig::Scaling::kLlama3;
  rope.low_frequency_factor = scaling.positive("low_freq_factor");
  rope.high_frequency_factor = scaling.positive("high_freq_factor");
  if (rope.high_frequency_factor <= rope.low_frequency_factor) {
    scaling.refuse("high_freq_factor", "more than low_freq_factor");
  }
  rope.original_positions = scaling.integer("original_max_position_embeddings", positions);
  return rope;
}

// Mistral has a window in all layers, Qwen in those from max_window_layers on, if it is switched on.
std::vector<int64_t> windows_of(const Keys& keys, const std::string& family, int64_t layers) {
  std::vector<int64_t> windows(layers, 0);
  if (family == "llama" || (family != "mistral" && !keys.flag("use_sliding_window"))) return windows;
  if (family == "mistral" && !keys.has("sliding_window")) return windows;
  const int64_t window = keys.integer("sliding_window");
  if (family != "mistral" && keys.has("layer_types")) {
    const json& types = keys.at("layer_types");
    if (!types.is_array() || types.size() != windows.size()) {
      keys.refuse("layer_types", cat("a list of ", layers, " names"));
    }
    for (size_t i = 0; i < windows.size(); ++i) {
      if (types[i] == "sliding_attention") windows[i] = window;
      if (types[i] != "sliding_attention" && types[i] != "full_attention") {
        keys.refuse("layer_types", "\"full_attention\" and \"sliding_attention\" in it");
      }
    }
    return windows;
  }
  const int64_t first = family == "mistral" ? 0 : keys.integer("max_window_layers", 28, 0);
  for (int64_t i = first; i < layers; ++i) windows[i] = window;
  return windows;
}

}  // namespace

json read_json(const std::string& path) {
  std::ifstream file(path);
  require<ds::IoError>(file.is_open(), path, ": cannot be opened");
  json value = json::parse(file, /*cb=*/nullptr, /*allow_exceptions=*/false);
  require<ds::ConfigError>(value.is_object(), path, ": expected a JSON object");
  return value;
}

LlamaConfig parse_config(const json& config, const std::string& where) {
  const Keys keys(config, where);
  const std::string family = keys.text("model_type", "");
  if (family != "llama" && family != "mistral" && family != "qwen2" && family != "qwen3") {
    keys.refuse("model_type", "\"llama\", \"mistral\", \"qwen2\" or \"qwen3\"");
  }
  keys.require_value("hidden_act", "silu");
  keys.require_value("attention_dropout", 0.0);
  keys.require_value("pretraining_tp", 1);
  if (keys.has("quantization_config")) keys.refuse("quantization_config", "full weights");
  LlamaConfig result;
  result.vocab = keys.integer("vocab_size");
  result.hidden = keys.integer("hidden_size");
  result.inner = keys.integer("intermediate_size");
  result.layers = keys.integer("num_hidden_layers");
  result.heads = keys.integer("num_attention_heads");
  result.kv_heads = keys.integer("num_key_value_heads", result.heads);
  if (result.heads % result.kv_heads != 0) keys.refuse("num_key_value_heads", cat("a divisor of ", result.heads));
  if (!keys.has("head_dim") && result.hidden % result.heads != 0) {
    keys.refuse("head_dim", cat("a size, because hidden_size is no multiple of ", result.heads, " heads"));
  }
  result.head_size = keys.integer("head_dim", result.hidden / result.heads);
  if (result.head_size % 2 != 0) keys.refuse("head_dim", "an even size, whose halves are turned");
  result.positions = keys.integer("max_position_embeddings");
  result.norm_eps = keys.positive("rms_norm_eps", 1e-6);
  result.initializer_range = keys.positive("initializer_range", 0.02);
  result.rope = rope_of(keys, where, result.positions);
  result.qkv_bias = family == "qwen2" || (family != "mistral" && keys.flag("attention_bias"));
  result.o_bias = (family == "llama" || family == "qwen3") && keys.flag("attention_bias");
  result.mlp_bias = family == "llama" && keys.flag("mlp_bias");
  result.head_norms = family == "qwen3";
  result.tie_embeddings = keys.flag("tie_word_embeddings");
  if (keys.has("pad_token_id")) result.padding = keys.integer("pad_token_id", {}, 0);
  result.windows = windows_of(keys, family, result.layers);
  return result;
}

LlamaConfig read_config(const std::string& folder) {
  const std::string path = (std::filesystem::path(folder) / "config.json").string();
  return parse_config(read_json(path), path);
}

}  // namespace llama
