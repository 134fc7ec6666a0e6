// The work of layers, told by their names: DeepSpeed's presets, Hugging Face's styles, and the habits of model
// families. Pure, torch-free.
#pragma once

#include <optional>
#include <string>

#include "dsengine/split_plan.h"

namespace ds::engine {

// The weights that are fused in one.
enum class Fusion {
  kNone,
  kQkv,      // query, key and value, one behind another; key and value may be smaller (grouped heads)
  kGateUp,   // two equal halves
  kPerHead,  // query, key and value of each head or group of heads: cut as it is
};

struct KnownLayer {
  parallel::Style style = parallel::Style::kColumn;
  Fusion fusion = Fusion::kNone;

  bool operator==(const KnownLayer&) const = default;
};

// "h.0.attn.qkv.weight" -> "h.0.attn.qkv", "qkv"; of a module's path its last name. Empty where there is none.
std::string owner_of(const std::string& path);
std::string last_name(const std::string& path);

// By the habits of Hugging Face's families, GPT-2, torch::nn and this repository's examples: of a weight, the whole
// name of the parameter. Nothing: not known.
std::optional<KnownLayer> known_layer(const std::string& parameter);
// By tensor_parallel.preset_model, "llama", ... Nothing: the preset leaves the parameter whole.
std::optional<KnownLayer> preset_layer(const std::string& preset, const std::string& parameter);
// "colwise", "rowwise", ...; nothing for a style that is not known.
std::optional<parallel::Style> style_of_tp_plan(const std::string& style);
// The styles that are known, for messages.
const char* tp_plan_styles();

// Tables of words: wte, embed_tokens, ...; and of positions, which stay whole.
bool is_word_embedding(const std::string& module);
bool is_position_embedding(const std::string& module);
// Layers whose outputs or inputs are heads.
bool is_attention_layer(const std::string& module);
// Weights, by their whole names, whose rows are heads of queries, keys or values, one behind another: DeepSpeed's names
// of per_head_muon, and fused ones. Not those of which heads have other sizes (q_b_proj, kv_b_proj) or whose heads may
// be columns (c_attn).
bool makes_heads(const std::string& parameter);
// Weights of which nanoGPT and GPT-2 have two forms, [out, in] and [in, out].
bool is_gpt2_name(const std::string& module);

}  // namespace ds::engine
