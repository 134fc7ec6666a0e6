#include "config/split/layer_sizes.h"

#include <algorithm>

#include "core/text.h"

namespace ds::engine {
namespace {

using parallel::NamedShape;
using parallel::Style;

bool divides_all(int64_t grain, const std::vector<int64_t>& blocks, int64_t extent) {
  if (blocks.empty()) return extent % grain == 0;
  return std::all_of(blocks.begin(), blocks.end(), [&](int64_t block) { return block % grain == 0; });
}

// "h.0.attn." of "h.0.attn.qkv.weight"; "h.0.attn." of torch::nn's "h.0.attn.in_proj_weight".
std::string layer_of(const NamedShape& weight) {
  const std::string module = owner_of(weight.name);
  const std::string owner = last_name(weight.name) == "weight" ? owner_of(module) : module;
  return owner.empty() ? owner : owner + ".";
}

std::string bias_of(const NamedShape& weight) {
  const std::string module = owner_of(weight.name);
  const std::string prefix = module.empty() ? module : module + ".";
  return prefix + (last_name(weight.name) == "weight" ? "bias" : "in_proj_bias");
}

}  // namespace

LayerSizes::LayerSizes(const std::vector<NamedShape>& parameters, int64_t grain)
    : parameters_(parameters), grain_(grain) {
  for (const NamedShape& parameter : parameters) by_name_.emplace(parameter.name, &parameter);
  inputs_first_ = stores_inputs_first();
}

const NamedShape* LayerSizes::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

// c_attn makes three of one, c_fc is wider than its input; a bias has the outputs.
bool LayerSizes::stores_inputs_first() const {
  for (const NamedShape& weight : parameters_) {
    const std::string module = owner_of(weight.name);
    if (weight.sizes.size() != 2 || !is_gpt2_name(module) || weight.sizes[0] == weight.sizes[1]) continue;
    const NamedShape* const bias = find(bias_of(weight));
    if (bias != nullptr && bias->sizes.size() == 1) return bias->sizes[0] == weight.sizes[1];
    if (last_name(module) != "c_proj") return weight.sizes[1] > weight.sizes[0];
  }
  return false;
}

int64_t LayerSizes::output_dim(const NamedShape& weight) const {
  if (weight.sizes.size() != 2) return 0;
  const NamedShape* const bias = find(bias_of(weight));
  if (bias != nullptr && bias->sizes.size() == 1 && last_name(weight.name) == "weight" &&
      weight.sizes[0] != weight.sizes[1]) {
    return bias->sizes[0] == weight.sizes[1] ? 1 : 0;
  }
  return inputs_first_ && is_gpt2_name(owner_of(weight.name)) ? 1 : 0;
}

// The width of all heads, which the layer behind them reads.
std::optional<int64_t> LayerSizes::attention_width(const NamedShape& weight) const {
  for (const char* name : {"o_proj", "out_proj", "dense", "c_proj", "proj", "wo", "to_out", "out"}) {
    const NamedShape* const out = find(cat(layer_of(weight), name, ".weight"));
    if (out != nullptr && out->sizes.size() == 2) return out->sizes[static_cast<size_t>(1 - output_dim(*out))];
  }
  return std::nullopt;
}

// The norms of queries and keys are as long as a head.
std::optional<int64_t> LayerSizes::head_size(const NamedShape& weight) const {
  if (!is_attention_layer(owner_of(weight.name))) return std::nullopt;
  for (const char* name : {"q_norm", "k_norm", "q_layernorm", "k_layernorm"}) {
    const NamedShape* const norm = find(cat(layer_of(weight), name, ".weight"));
    if (norm != nullptr && norm->sizes.size() == 1) return norm->sizes[0];
  }
  return std::nullopt;
}

std::vector<int64_t> LayerSizes::fused_blocks(const NamedShape& weight, Fusion fusion, int64_t dim) const {
  const int64_t out = weight.sizes[static_cast<size_t>(dim)];
  if (fusion == Fusion::kGateUp && out % 2 == 0) return {out / 2, out / 2};
  if (fusion != Fusion::kQkv) return {};
  const int64_t third = out % 3 == 0 ? out / 3 : 0;
  const int64_t queries = last_name(weight.name) == "in_proj_weight" ? third : attention_width(weight).value_or(third);
  const int64_t rest = out - queries;
  if (queries <= 0 || rest <= 0 || rest % 2 != 0) return {};
  return {queries, rest / 2, rest / 2};
}

int64_t LayerSizes::grain_for(const NamedShape& weight, const LogicalCut& cut) const {
  const int64_t extent = weight.sizes[static_cast<size_t>(cut.dim)];
  if (const std::optional<int64_t> head = head_size(weight); head && *head > 0 && cut.grain == 1) {
    int64_t grain = *head;
    // As many groups of heads as there are keys: a rank has whole groups.
    for (const char* name : {"k_proj", "key", "wk", "k"}) {
      const NamedShape* const keys = find(cat(layer_of(weight), name, ".weight"));
      if (keys == nullptr || keys->sizes.empty() || !cut.blocks.empty()) continue;
      const int64_t groups = keys->sizes[0] / *head;
      if (groups > 0 && extent % groups == 0) grain = extent / groups;
    }
    if (grain < extent && divides_all(grain, cut.blocks, extent)) return grain;
  }
  const bool fits = grain_ > cut.grain && grain_ % cut.grain == 0 && divides_all(grain_, cut.blocks, extent);
  return fits ? grain_ : cut.grain;
}

SplitDecision LayerSizes::decision(const NamedShape& weight, const KnownLayer& layer, std::string origin) const {
  SplitDecision result{.style = layer.style, .blocks = {}, .origin = std::move(origin)};
  if (layer.style == Style::kWhole) return result;
  LogicalCut cut;
  if (layer.style != Style::kVocabulary) {
    const int64_t out = output_dim(weight);
    cut.dim = layer.style == Style::kRow ? 1 - out : out;
    if (layer.style == Style::kColumn) cut.blocks = fused_blocks(weight, layer.fusion, out);
  }
  result.dim = cut.dim;
  result.grain = grain_for(weight, cut);
  result.blocks = std::move(cut.blocks);
  return result;
}

std::optional<std::pair<std::string, SplitDecision>> LayerSizes::bias_decision(const NamedShape& weight,
                                                                               const SplitDecision& decision) const {
  const std::string own = last_name(weight.name);
  const NamedShape* const bias = find(bias_of(weight));
  if (bias == nullptr || bias->sizes.size() != 1 || !(own == "weight" || own.ends_with("_proj_weight"))) {
    return std::nullopt;
  }
  SplitDecision result{
      .style = decision.style, .blocks = {}, .origin = decision.origin, .join_output = decision.join_output};
  if (decision.style == Style::kRow || decision.style == Style::kWhole) return {{bias->name, result}};
  const int64_t outputs = bias->sizes[0];
  if (own != "weight" && own != "in_proj_weight") {  // one bias for the three weights
    if (outputs % 3 != 0) return std::nullopt;
    result.blocks.assign(3, outputs / 3);
  } else {
    if (weight.sizes[static_cast<size_t>(decision.dim.value_or(0))] != outputs) return std::nullopt;
    result.blocks = decision.blocks;
    result.grain = decision.grain;
  }
  return {{bias->name, result}};
}

std::vector<std::string> LayerSizes::uneven(const std::unordered_map<std::string, SplitDecision>& decisions,
                                            int64_t ranks) const {
  if (ranks <= 1) return {};
  int64_t count = 0;
  std::string first;
  for (const NamedShape& weight : parameters_) {
    const auto found = decisions.find(weight.name);
    if (found == decisions.end() || weight.sizes.size() != 2 || !is_attention_layer(owner_of(weight.name))) continue;
    const SplitDecision& decision = found->second;
    if (decision.style == Style::kWhole || decision.grain > 1) continue;
    if (divides_all(ranks, decision.blocks, weight.sizes[static_cast<size_t>(decision.dim.value_or(0))])) continue;
    if (count++ == 0) first = weight.name;
  }
  if (count == 0) return {};
  return {
      cat("tensor_parallel: ", ranks, " ranks do not divide ", first, count > 1 ? cat(" and ", count - 1, " more") : "",
          ", and cut heads in the middle, which is right but slow; set tensor_parallel.tensor_parallel.tp_grain_size ",
          "to the size of a head")};
}

}  // namespace ds::engine
