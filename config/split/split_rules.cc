#include "config/split/split_rules.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>

#include "config/split/layer_names.h"
#include "config/split/layer_sizes.h"
#include "config/split/logical_cut.h"
#include "config/split/partition_config.h"
#include "config/split/rules_from_names.h"
#include "core/ascii.h"
#include "core/check.h"
#include "core/json/json_convert.h"
#include "core/json/json_problems.h"
#include "core/name_pattern.h"

namespace ds::engine {
namespace {

using config::LayerPartition;
using config::PartitionType;
using parallel::NamedShape;
using parallel::Style;

constexpr const char* kSection = "tensor_parallel";

// An entry of layer_specs, ready to be compared.
struct CompiledSpec {
  const LayerPartition* spec;
  std::string path;  // "tensor_parallel.partition_config.layer_specs.1"
  std::vector<NamePattern> patterns;
  bool matched = false;

  // The text of the first pattern that the name starts with, as Python's re.match has it; null: there is none.
  const std::string* matching(const std::string& name) const {
    for (size_t i = 0; i < patterns.size(); ++i) {
      if (patterns[i].matches(name, NamePart::kStart)) return &spec->patterns[i];
    }
    return nullptr;
  }
};

// An entry of tp_plan: a module's name in which * is a number, and which may go on to the front.
struct CompiledStyle {
  std::string name;
  NamePattern pattern;
  std::string text;
  Style style = Style::kColumn;
  bool matched = false;
};

class Splitter {
 public:
  Splitter(const config::TensorParallelSection& section, const std::vector<NamedShape>& parameters)
      : section_(section),
        sizes_(parameters, section.tensor_parallel.tp_grain_size),
        config_(config::read_partition_config(section.partition_config, throw_problem)) {
    for (const std::string& pattern : config_.lm_head_patterns) head_patterns_.push_back(NamePattern::regex(pattern));
    compile_specs();
    compile_tp_plan();
    read_injection();
  }

  SplitRules run() {
    for (const NamedShape& parameter : sizes_.parameters()) decide(parameter);
    require_vocabulary();
    require_all_named();
    warn_of_unmatched();
    result_.rules = rules_by_name(sizes_.parameters(), decisions_);
    return std::move(result_);
  }

 private:
  static void throw_problem(const std::string& pointer, const std::string& message) {
    throw ConfigError(cat(dotted_path(pointer), ": ", message));
  }
  bool names_layers() const { return !specs_.empty() || has_preset() || !tp_plan_.empty(); }
  bool has_preset() const {
    return section_.preset_model && (section_.partition_config.is_null() || config_.use_default_specs);
  }

  void compile_specs();
  void compile_tp_plan();
  void read_injection();
  void decide(const NamedShape& parameter);
  std::optional<SplitDecision> decision_for(const NamedShape& weight);
  std::optional<SplitDecision> by_spec(const NamedShape& weight);
  std::optional<SplitDecision> by_tp_plan(const NamedShape& weight);
  std::optional<SplitDecision> by_vocabulary(const NamedShape& weight);
  std::optional<SplitDecision> by_injection(const NamedShape& weight);
  SplitDecision whole(std::string origin) {
    return {.style = Style::kWhole, .blocks = {}, .origin = std::move(origin)};
  }
  bool is_head(const std::string& module) const;
  void require_vocabulary() const;
  void require_all_named() const;
  void warn_of_unmatched();

  const config::TensorParallelSection& section_;
  LayerSizes sizes_;
  config::PartitionConfig config_;
  std::vector<NamePattern> head_patterns_;
  std::vector<CompiledSpec> specs_;
  std::vector<CompiledStyle> tp_plan_;
  std::vector<std::string> injected_;  // names of row layers
  std::vector<std::string> blocks_;    // "encoder.layer.0.", with an injected layer in it
  std::vector<bool> injected_found_;
  std::unordered_map<std::string, SplitDecision> decisions_;
  std::vector<std::string> unnamed_;  // matrices that stay whole
  bool vocabulary_found_ = false;
  SplitRules result_;
};

void Splitter::compile_specs() {
  for (size_t i = 0; i < config_.layer_specs.size(); ++i) {
    const LayerPartition& spec = config_.layer_specs[i];
    const std::string path = cat(kSection, ".partition_config.layer_specs.", i);
    if (!spec.model_types.empty()) {
      // A module in C++ has no model_type; the preset's name is one.
      const std::string type = section_.preset_model.value_or("");
      const auto is_type = [&](const std::string& other) { return ascii_lower(other) == type; };
      if (std::none_of(spec.model_types.begin(), spec.model_types.end(), is_type)) {
        result_.warnings.push_back(cat(path, ".model_types: does not have ",
                                       type.empty() ? "a preset_model to be compared with" : type,
                                       "; the entry is left out"));
        continue;
      }
    }
    CompiledSpec compiled{.spec = &spec, .path = path, .patterns = {}};
    for (const std::string& pattern : spec.patterns) compiled.patterns.push_back(NamePattern::regex(pattern));
    specs_.push_back(std::move(compiled));
  }
}

void Splitter::compile_tp_plan() {
  for (const auto& [name, text] : config_.tp_plan) {
    const std::optional<Style> style = style_of_tp_plan(text);
    require<ConfigError>(style.has_value(), kSection, ".partition_config.tp_plan: '", name, "': expected one of ",
                         tp_plan_styles(), ", found ", text);
    tp_plan_.push_back({.name = name, .pattern = NamePattern::numbers(name), .text = text, .style = *style});
  }
}

void Splitter::read_injection() {
  const nlohmann::ordered_json& json = section_.injection_policy_tuple;
  if (json.is_null()) return;
  constexpr const char* kKey = "tensor_parallel.injection_policy_tuple";
  require<ConfigError>(json.is_array(), kKey, ": expected a list of names of layers, found ", shown(json));
  for (const auto& entry : json) {
    require<ConfigError>(entry.is_string() && !entry.get<std::string>().empty(), kKey,
                         ": expected names of layers whose outputs are added, as \"attention.output.dense\", found ",
                         shown(entry));
    injected_.push_back(entry.get<std::string>());
  }
  injected_found_.resize(injected_.size());
  for (const NamedShape& parameter : sizes_.parameters()) {
    const std::string module = owner_of(parameter.name);
    for (size_t i = 0; i < injected_.size(); ++i) {
      const std::string& name = injected_[i];
      if (module != name && !module.ends_with("." + name)) continue;
      blocks_.push_back(module.substr(0, module.size() - name.size()));
      injected_found_[i] = true;
    }
  }
}

std::optional<SplitDecision> Splitter::by_spec(const NamedShape& weight) {
  CompiledSpec* found = nullptr;
  const std::string* pattern = nullptr;
  for (CompiledSpec& entry : specs_) {
    const std::string* matching = entry.matching(weight.name);
    if (matching == nullptr) matching = entry.matching(owner_of(weight.name));
    if (matching == nullptr) continue;
    entry.matched = true;
    if (found != nullptr) {
      result_.warnings.push_back(
          cat(entry.path, ": ", weight.name, " is named by ", found->path, " too, which comes first and decides"));
      continue;
    }
    found = &entry;
    pattern = matching;
  }
  if (found == nullptr) return std::nullopt;
  const std::string origin = cat(found->path.substr(sizeof("tensor_parallel.") - 1), " '", *pattern, "'");
  if (found->spec->type == PartitionType::kSkip) return whole(origin);
  const LogicalCut cut = logical_cut(*found->spec, weight.sizes, weight.name, found->path);
  return SplitDecision{.style = found->spec->type == PartitionType::kRow ? Style::kRow : Style::kColumn,
                       .dim = cut.dim,
                       .blocks = cut.blocks,
                       .grain = sizes_.grain_for(weight, cut),
                       .origin = origin,
                       .join_output = found->spec->gather_output};
}

std::optional<SplitDecision> Splitter::by_tp_plan(const NamedShape& weight) {
  for (CompiledStyle& entry : tp_plan_) {
    const auto ends = [&](const std::string& full) { return entry.pattern.matches(full, NamePart::kEnd); };
    if (!ends(owner_of(weight.name)) && !ends(weight.name)) continue;
    entry.matched = true;
    const std::string origin = cat("tp_plan '", entry.name, "': ", entry.text);
    if (entry.style == Style::kWhole) return whole(origin);
    Fusion fusion = Fusion::kNone;
    if (const auto known = known_layer(weight.name)) fusion = known->fusion;
    const bool head = entry.style == Style::kColumn && is_head(owner_of(weight.name));
    vocabulary_found_ = vocabulary_found_ || head;
    return sizes_.decision(weight, {head ? Style::kVocabulary : entry.style, fusion}, origin);
  }
  return std::nullopt;
}

bool Splitter::is_head(const std::string& module) const {
  const std::string name = last_name(module);
  for (const NamePattern& pattern : head_patterns_) {
    if (pattern.matches(name, NamePart::kAnywhere) || pattern.matches(module)) return true;
  }
  // Where the key does not say otherwise, what such layers are called in C++ too.
  return !(section_.partition_config.is_object() && section_.partition_config.contains("lm_head_patterns")) &&
         (name == "head" || name == "output" || name == "output_layer");
}

// The head and the word embeddings, which may be one tensor: then both must be cut alike.
std::optional<SplitDecision> Splitter::by_vocabulary(const NamedShape& weight) {
  const std::string module = owner_of(weight.name);
  const bool head = is_head(module);
  if (weight.sizes.size() != 2 || (!head && !is_word_embedding(module))) return std::nullopt;
  vocabulary_found_ = true;
  std::vector<const NamedShape*> heads;
  std::vector<const NamedShape*> words;
  for (const NamedShape& other : sizes_.parameters()) {
    if (other.sizes.size() != 2) continue;
    if (is_head(owner_of(other.name))) heads.push_back(&other);
    if (is_word_embedding(owner_of(other.name))) words.push_back(&other);
  }
  const auto same_size = [&](const NamedShape* other) { return other->sizes == weight.sizes; };
  if (!section_.vocab_parallel_lm_head.value_or(true)) {
    const bool tied = heads.empty() || std::any_of(heads.begin(), heads.end(), same_size);
    if (head || tied) return whole(cat("vocab_parallel_lm_head: false", head ? "" : ", which may be the same tensor"));
  }
  const bool along_width = config_.embedding_partition_dim.value_or(0) == 1;
  if (along_width && !head) {
    return SplitDecision{.style = Style::kColumn, .dim = 1, .blocks = {}, .origin = "embedding_partition_dim: 1"};
  }
  if (along_width && std::any_of(words.begin(), words.end(), same_size)) {
    return SplitDecision{.style = Style::kRow,
                         .dim = 1,
                         .blocks = {},
                         .origin = "embedding_partition_dim: 1, of a tensor that may be the same"};
  }
  return sizes_.decision(weight, {Style::kVocabulary}, "vocab_parallel_lm_head");
}

// Layers that are named are rows; the other ones of their blocks make what these read.
std::optional<SplitDecision> Splitter::by_injection(const NamedShape& weight) {
  constexpr const char* kOrigin = "injection_policy_tuple";
  const std::string module = owner_of(weight.name);
  for (const std::string& name : injected_) {
    if (module == name || module.ends_with("." + name)) return sizes_.decision(weight, {Style::kRow}, kOrigin);
  }
  const bool inside =
      std::any_of(blocks_.begin(), blocks_.end(), [&](const std::string& block) { return module.starts_with(block); });
  if (!inside || is_word_embedding(module) || is_position_embedding(module)) return std::nullopt;
  const auto known = known_layer(weight.name);
  if (known && known->style == Style::kWhole) return whole(kOrigin);
  return sizes_.decision(weight, {Style::kColumn, known ? known->fusion : Fusion::kNone}, kOrigin);
}

std::optional<SplitDecision> Splitter::decision_for(const NamedShape& weight) {
  if (auto found = by_spec(weight)) return found;
  if (has_preset()) {
    if (const auto known = preset_layer(*section_.preset_model, weight.name)) {
      return sizes_.decision(weight, *known, cat("preset_model ", *section_.preset_model));
    }
  }
  if (auto found = by_tp_plan(weight)) return found;
  if (auto found = by_vocabulary(weight)) return found;
  if (names_layers()) return std::nullopt;
  if (!injected_.empty()) return by_injection(weight);
  const auto known = known_layer(weight.name);
  // Weights of experts in one tensor, and convolutions, are for layer_specs.
  if (!known || weight.sizes.size() != 2) return std::nullopt;
  return sizes_.decision(weight, *known, "its name");
}

void Splitter::decide(const NamedShape& parameter) {
  if (parameter.sizes.size() < 2) return;
  std::optional<SplitDecision> decision = decision_for(parameter);
  if (!decision) {
    const std::string module = owner_of(parameter.name);
    if (!is_word_embedding(module) && !is_position_embedding(module)) unnamed_.push_back(parameter.name);
    return;
  }
  if (auto bias = sizes_.bias_decision(parameter, *decision)) decisions_.emplace(bias->first, std::move(bias->second));
  decisions_.emplace(parameter.name, std::move(*decision));
}

void Splitter::require_vocabulary() const {
  if (!section_.vocab_parallel_lm_head.value_or(false) || sizes_.parameters().empty()) return;
  std::string patterns;
  for (const std::string& pattern : config_.lm_head_patterns) patterns += cat(patterns.empty() ? "" : ", ", pattern);
  require<ConfigError>(vocabulary_found_, kSection, ".vocab_parallel_lm_head: true needs a layer of the vocabulary, ",
                       "found none; name it in ", kSection, ".partition_config.lm_head_patterns, which has ", patterns);
}

void Splitter::require_all_named() const {
  if (!config_.strict_mode || unnamed_.empty()) return;
  constexpr size_t kMost = 10;
  std::string names;
  for (size_t i = 0; i < std::min(unnamed_.size(), kMost); ++i) names += cat("\n  ", unnamed_[i]);
  if (unnamed_.size() > kMost) names += cat("\n  and ", unnamed_.size() - kMost, " more");
  throw ConfigError(cat(kSection, ".partition_config.strict_mode: true, and nothing names ", unnamed_.size(),
                        unnamed_.size() == 1 ? " matrix" : " matrices", "; add an entry of layer_specs for each (",
                        "\"partition_type\": \"skip\" leaves it whole), or turn strict_mode off:", names));
}

void Splitter::warn_of_unmatched() {
  if (sizes_.parameters().empty()) return;
  for (const CompiledSpec& entry : specs_) {
    if (!entry.matched) {
      result_.warnings.push_back(cat(entry.path, ": names no parameter; patterns are for whole names, as '",
                                     sizes_.parameters().back().name, "'"));
    }
  }
  for (const CompiledStyle& entry : tp_plan_) {
    if (!entry.matched) {
      result_.warnings.push_back(cat(kSection, ".partition_config.tp_plan: '", entry.name, "' names no parameter"));
    }
  }
  for (size_t i = 0; i < injected_.size(); ++i) {
    if (!injected_found_[i]) {
      result_.warnings.push_back(cat(kSection, ".injection_policy_tuple: '", injected_[i], "' names no layer"));
    }
  }
  for (const std::string& warning : sizes_.uneven(decisions_, section_.size())) result_.warnings.push_back(warning);
}

}  // namespace

std::string nothing_is_split(int64_t ranks) {
  return cat(kSection, ".autotp_size: ", ranks,
             ": expected layers that are split, found none in the model: each of the ", ranks,
             " ranks would compute all of it. Name them in ", kSection, ".partition_config.layer_specs, as ",
             "[{\"patterns\": [\".*\\\\.up\\\\.weight\"], \"partition_type\": \"column\"}, {\"patterns\": ",
             "[\".*\\\\.down\\\\.weight\"], \"partition_type\": \"row\"}], give rules with InitializeOptions::split, ",
             "or set autotp_size to 1 (docs/tensor_parallel.md)");
}

SplitRules split_rules(const config::TensorParallelSection& section, const std::vector<NamedShape>& parameters) {
  return Splitter(section, parameters).run();
}

}  // namespace ds::engine
