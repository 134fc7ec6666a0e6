// Low-rank adapters (LoRA, arXiv:2106.09685) in PEFT's layout: a folder with adapter_config.json and
// adapter_model.safetensors.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "llama_config.h"

namespace llama {

struct LoraConfig {
  int64_t rank = 8;
  double alpha = 16.0;
  double dropout = 0.0;
  bool rank_stabilized = false;   // PEFT's use_rslora: scaled by the root of the rank
  std::set<std::string> targets;  // full names of the linear layers that have an adapter

  // The factor of B (A x).
  double scale() const;
};

// The full names of the linear layers that `patterns` mean, as PEFT reads a list: a name, or the end of names behind a
// dot ("q_proj"); "all-linear": those of all blocks. Throws ds::ConfigError for one that means none.
std::set<std::string> find_targets(const LlamaConfig& config, const std::vector<std::string>& patterns);

// Reads FOLDER/adapter_config.json. Throws ds::ConfigError for what the model cannot follow.
LoraConfig read_lora(const LlamaConfig& config, const std::string& folder);
// Writes it. `base`: where the weights of the base are, which PEFT reads them from.
void write_lora(const LoraConfig& lora, const std::string& base, const std::string& folder);

// The file of adapters in a folder, and a parameter's name in it.
std::string adapter_file(const std::string& folder);
std::string adapter_name(const std::string& parameter);

}  // namespace llama
