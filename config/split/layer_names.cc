#include "config/split/layer_names.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <string_view>
#include <utility>
#include <vector>

#include "core/name_pattern.h"

namespace ds::engine {
namespace {

using parallel::Style;

bool one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// A layer whose weight's name ends with what the pattern matches.
struct NamedLayer {
  NamePattern end;
  KnownLayer layer;
};
using NamedLayers = std::vector<NamedLayer>;

NamedLayer named(const std::string& end, Style style, Fusion fusion = Fusion::kNone) {
  return {NamePattern::regex(end), {style, fusion}};
}

std::optional<KnownLayer> find_in(const NamedLayers& layers, const std::string& parameter) {
  for (const NamedLayer& entry : layers) {
    if (entry.end.matches(parameter, NamePart::kEnd)) return entry.layer;
  }
  return std::nullopt;
}

NamedLayers llama_layers() {
  return {named("o_proj\\.weight", Style::kRow), named("[qkv]_proj\\.weight", Style::kColumn),
          named("down_proj\\.weight", Style::kRow), named("(up|gate)_proj\\.weight", Style::kColumn)};
}

NamedLayers bloom_layers(Fusion attention, Fusion mlp) {
  return {named("dense\\.weight", Style::kRow), named("query_key_value\\.weight", Style::kColumn, attention),
          named("dense_4h_to_h\\.weight", Style::kRow), named("dense_h_to_4h\\.weight", Style::kColumn, mlp)};
}

// The entries of DeepSpeed's AutoTPPresets. How much was fused follows from sizes, so that grouped heads are right too.
NamedLayers layers_of_preset(const std::string& preset) {
  if (preset == "llama" || preset == "qwen2") return llama_layers();
  if (preset == "bloom") return bloom_layers(Fusion::kPerHead, Fusion::kNone);
  if (preset == "chatglm") return bloom_layers(Fusion::kQkv, Fusion::kGateUp);
  if (preset == "mixtral") {
    return {named("o_proj\\.weight", Style::kRow), named("[qkv]_proj\\.weight", Style::kColumn),
            named("experts\\.\\d+\\.w2\\.weight", Style::kRow),
            named("experts\\.\\d+\\.w[13]\\.weight", Style::kColumn), named("gate\\.weight", Style::kWhole)};
  }
  if (preset == "deepseek_v2") {
    return {named("o_proj\\.weight", Style::kRow),
            named("(q_a_proj|kv_a_proj_with_mqa)\\.weight", Style::kWhole),
            named("(q_b_proj|kv_b_proj)\\.weight", Style::kColumn),
            named("experts\\.\\d+\\.down_proj\\.weight", Style::kRow),
            named("experts\\.\\d+\\.(up|gate)_proj\\.weight", Style::kColumn),
            named("gate\\.weight", Style::kWhole),
            named("shared_experts\\.down_proj\\.weight", Style::kRow),
            named("shared_experts\\.(up|gate)_proj\\.weight", Style::kColumn)};
  }
  if (preset == "phi3") {
    return {named("o_proj\\.weight", Style::kRow), named("qkv_proj\\.weight", Style::kColumn, Fusion::kQkv),
            named("down_proj\\.weight", Style::kRow), named("gate_up_proj\\.weight", Style::kColumn, Fusion::kGateUp)};
  }
  return {};
}

// The weights of torch::nn::MultiheadAttention are parameters of its own.
std::optional<KnownLayer> known_parameter(std::string_view name) {
  if (name == "in_proj_weight") return KnownLayer{Style::kColumn, Fusion::kQkv};
  if (one_of(name, {"q_proj_weight", "k_proj_weight", "v_proj_weight"})) return KnownLayer{Style::kColumn};
  return std::nullopt;
}

bool is_attention(std::string_view module) {
  return one_of(module, {"attn", "attention", "self_attn", "self_attention", "selfattention", "cross_attn",
                         "crossattention", "mha"});
}

bool is_mlp(std::string_view module) { return one_of(module, {"mlp", "ffn", "feed_forward", "feedforward"}); }

// Names that mean one thing wherever they stand.
std::optional<KnownLayer> known_by_last(std::string_view name) {
  if (one_of(name, {"qkv", "qkv_proj", "c_attn", "Wqkv", "to_qkv"})) return KnownLayer{Style::kColumn, Fusion::kQkv};
  if (name == "query_key_value") return KnownLayer{Style::kColumn, Fusion::kPerHead};
  if (one_of(name, {"gate_up_proj", "gate_up"})) return KnownLayer{Style::kColumn, Fusion::kGateUp};
  if (one_of(name, {"q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "query", "key", "value", "wq", "wk",    "wv",
                    "q_lin",  "k_lin",  "v_lin",  "to_q",     "to_k",      "to_v",  "q",   "k",     "v",  "q_attn"})) {
    return KnownLayer{Style::kColumn};
  }
  if (one_of(name, {"gate_proj", "up_proj", "fc", "fc1", "fc_in", "c_fc", "dense_h_to_4h", "linear1", "lin1", "w1",
                    "w3", "wi", "wi_0", "wi_1"})) {
    return KnownLayer{Style::kColumn};
  }
  if (one_of(name, {"o_proj", "out_proj", "out_lin", "to_out", "wo", "o", "c_proj", "down_proj", "fc2", "fc_out",
                    "dense_4h_to_h", "linear2", "lin2", "w2"})) {
    return KnownLayer{Style::kRow};
  }
  if (one_of(name, {"router", "gate", "q_a_proj", "kv_a_proj_with_mqa"})) return KnownLayer{Style::kWhole};
  return std::nullopt;
}

}  // namespace

std::string owner_of(const std::string& path) {
  const size_t dot = path.rfind('.');
  return dot == std::string::npos ? std::string() : path.substr(0, dot);
}

std::string last_name(const std::string& path) {
  const size_t dot = path.rfind('.');
  return dot == std::string::npos ? path : path.substr(dot + 1);
}

std::optional<KnownLayer> known_layer(const std::string& parameter) {
  const std::string own = last_name(parameter);
  if (const auto known = known_parameter(own)) return known;
  if (own != "weight") return std::nullopt;
  const std::string module = owner_of(parameter);
  const std::string name = last_name(module);
  const std::string owner = last_name(owner_of(module));
  if (name == "proj" && (is_attention(owner) || is_mlp(owner))) return KnownLayer{Style::kRow};
  if (name == "dense") {
    if (is_attention(owner) || owner == "output") return KnownLayer{Style::kRow};
    if (owner == "intermediate") return KnownLayer{Style::kColumn};
  }
  return known_by_last(name);
}

std::optional<KnownLayer> preset_layer(const std::string& preset, const std::string& parameter) {
  static const std::array<std::pair<std::string, NamedLayers>, 7> kPresets = [] {
    std::array<std::pair<std::string, NamedLayers>, 7> made;
    size_t next = 0;
    for (const char* name : {"llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"}) {
      made[next++] = {name, layers_of_preset(name)};
    }
    return made;
  }();
  for (const auto& [name, layers] : kPresets) {
    if (name == preset) return find_in(layers, parameter);
  }
  return std::nullopt;
}

std::optional<Style> style_of_tp_plan(const std::string& style) {
  if (one_of(style, {"colwise", "colwise_rep", "colwise_gather_output"})) return Style::kColumn;
  if (one_of(style, {"rowwise", "rowwise_rep"})) return Style::kRow;
  if (style == "embedding_rowwise") return Style::kVocabulary;
  if (one_of(style, {"replicated_with_grad_allreduce", "replicate"})) return Style::kWhole;
  return std::nullopt;
}

const char* tp_plan_styles() {
  return "colwise, colwise_rep, colwise_gather_output, rowwise, rowwise_rep, embedding_rowwise, replicate, "
         "replicated_with_grad_allreduce";
}

bool is_word_embedding(const std::string& module) {
  return one_of(last_name(module),
                {"wte", "embed_tokens", "word_embeddings", "word_embedding", "tok_embeddings", "token_embedding",
                 "token_embeddings", "embed_in", "tok_emb", "embedding", "embed", "shared"});
}

bool is_position_embedding(const std::string& module) {
  return one_of(last_name(module), {"wpe", "embed_positions", "position_embeddings", "token_type_embeddings",
                                    "pos_embedding", "position_embedding", "pos_emb"});
}

bool is_attention_layer(const std::string& module) {
  return one_of(last_name(module),
                {"q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "qkv", "qkv_proj", "Wqkv", "query", "key",
                 "value",  "wq",     "wk",     "wv",     "wo",       "q",   "k",        "v",    "o",     "c_attn"});
}

bool makes_heads(const std::string& parameter) {
  const std::string name = last_name(parameter);
  if (name != "weight") return known_parameter(name).has_value();
  return one_of(last_name(owner_of(parameter)), {"q_proj", "k_proj", "v_proj", "query", "key", "value", "wq", "wk",
                                                 "wv", "qkv", "qkv_proj", "query_key_value", "Wqkv"});
}

bool is_gpt2_name(const std::string& module) {
  return one_of(last_name(module), {"c_attn", "c_fc", "c_proj", "q_attn"});
}

}  // namespace ds::engine
