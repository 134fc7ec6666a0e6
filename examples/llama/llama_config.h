// The shape of a decoder of the Llama family, read from Hugging Face's config.json: Llama 2 and 3, Mistral, Qwen2,
// Qwen3.
//
// Plain values. Whatever in the file the model cannot follow is a ds::ConfigError that names file, key and value.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace llama {

// Rotary positions: the base of the frequencies, and how these are scaled for long texts.
struct RopeConfig {
  enum class Scaling : uint8_t { kNone, kLinear, kLlama3 };
  double theta = 10000.0;
  Scaling scaling = Scaling::kNone;
  double factor = 1.0;
  // kLlama3: wavelengths below original_positions / high_frequency_factor stay, those above original_positions /
  // low_frequency_factor are divided by the factor, and those between are blended.
  double low_frequency_factor = 1.0;
  double high_frequency_factor = 4.0;
  int64_t original_positions = 0;
};

struct LlamaConfig {
  int64_t vocab = 0;
  int64_t hidden = 0;
  int64_t inner = 0;  // of the MLP
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;   // heads of keys and values, a divisor of heads
  int64_t head_size = 0;  // need not be hidden / heads
  int64_t positions = 0;  // the longest text that the model was made for
  double norm_eps = 1e-6;
  double initializer_range = 0.02;  // the standard deviation of new weights
  RopeConfig rope;
  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;
  bool head_norms = false;  // queries and keys are normalized, head by head (Qwen3)
  bool tie_embeddings = false;
  std::optional<int64_t> padding;  // the token whose embedding gets no gradient
  // For each layer the number of positions that a token sees, its own among them; 0: all earlier ones.
  std::vector<int64_t> windows;
};

// Reads a JSON file. Throws ds::IoError, or ds::ConfigError for a file that is no JSON object.
nlohmann::json read_json(const std::string& path);

// `where`: the file, for messages.
LlamaConfig parse_config(const nlohmann::json& config, const std::string& where);
// Reads FOLDER/config.json.
LlamaConfig read_config(const std::string& folder);

}  // namespace llama
