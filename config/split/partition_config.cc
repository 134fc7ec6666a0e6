#include "config/split/partition_config.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "core/ascii.h"
#include "core/json/json_convert.h"
#include "core/name_pattern.h"
#include "core/text.h"

namespace ds::engine::config {
namespace {

using nlohmann::ordered_json;

constexpr const char* kRoot = "/tensor_parallel/partition_config";
constexpr std::array<PartitionType, 3> kPartitionTypes = {PartitionType::kColumn, PartitionType::kRow,
                                                          PartitionType::kSkip};

// An object of the section, key by key.
class PartitionObject {
 public:
  PartitionObject(const ordered_json& json, std::string pointer, const PartitionProblem& problem)
      : json_(json), pointer_(std::move(pointer)), problem_(problem) {}

  template <class T>
  void field(const char* key, T& out) {
    const ordered_json* const value = find(key);
    if (value != nullptr && !convert(*value, out)) wrong(key, wanted(out));
  }
  // Declares the key; null where it is absent or null.
  const ordered_json* find(const char* key) {
    known_.emplace_back(key);
    const auto found = json_.find(key);
    return found == json_.end() || found->is_null() ? nullptr : &*found;
  }
  void wrong(const char* key, const std::string& expected) {
    problem_(at(key), cat("expected ", expected, ", found ", shown(json_.at(key))));
  }
  std::string at(const std::string& key) const { return cat(pointer_, "/", key); }
  // Keys that nothing above has named.
  void finish() {
    std::string names;
    for (const std::string& name : known_) names += cat(names.empty() ? "" : ", ", name);
    for (const auto& entry : json_.items()) {
      if (std::find(known_.begin(), known_.end(), entry.key()) != known_.end()) continue;
      problem_(at(entry.key()), cat("is no key of this section; known are ", names));
    }
  }

 private:
  const ordered_json& json_;
  std::string pointer_;
  const PartitionProblem& problem_;
  std::vector<std::string> known_;
};

// The types of Python's `re` that ECMAScript has too.
void check_pattern(const std::string& pattern, const std::string& pointer, const PartitionProblem& problem) {
  const std::string reason = regex_problem(pattern);
  if (reason.empty()) return;
  problem(pointer, cat("'", pattern, "' is no regular expression of ECMAScript: ", reason,
                       "; named groups, flags as (?i) and looking back are Python's own"));
}

void read_type(PartitionObject& object, PartitionType& out) {
  const ordered_json* const value = object.find("partition_type");
  if (value == nullptr) return;
  std::string text;
  if (convert(*value, text)) {
    for (const PartitionType type : kPartitionTypes) {
      if (!equal_in_any_case(text, name_of(type))) continue;
      out = type;
      return;
    }
  }
  object.wrong("partition_type", "one of row, column, skip");
}

// [3, -1], [[q, k, v], -1], [E, -1, h]
bool read_shape(const ordered_json& json, std::vector<LogicalSize>& out) {
  if (!json.is_array() || json.empty()) return false;
  std::vector<LogicalSize> shape;
  for (const ordered_json& entry : json) {
    LogicalSize size;
    if (entry.is_array()) {
      if (entry.empty() || !convert(entry, size.parts)) return false;
      if (std::any_of(size.parts.begin(), size.parts.end(), [](int64_t part) { return part <= 0; })) return false;
    } else if (!entry.is_number_integer() || !convert(entry, size.size) || size.size == 0 || size.size < -1) {
      return false;
    }
    shape.push_back(std::move(size));
  }
  out = std::move(shape);
  return true;
}

// The dimension that is cut exists, and is the only one that may be a list.
void check_partition_dim(const LayerPartition& spec, PartitionObject& object, const PartitionProblem& problem) {
  if (spec.partition_dim && *spec.partition_dim < 0) return object.wrong("partition_dim", "an integer of at least 0");
  if (spec.shape.empty()) return;
  const int64_t dim = spec.partition_dim.value_or(spec.type == PartitionType::kRow ? 1 : 0);
  if (dim >= static_cast<int64_t>(spec.shape.size())) {
    problem(object.at("shape"), cat("has ", spec.shape.size(), " dimensions, partition_dim is ", dim));
  }
  for (size_t i = 0; i < spec.shape.size(); ++i) {
    if (spec.shape[i].parts.empty() || static_cast<int64_t>(i) == dim) continue;
    problem(object.at("shape"),
            cat("has a list of sizes in dimension ", i, "; only dimension ", dim, ", which is cut, can have one"));
  }
}

LayerPartition read_layer(const ordered_json& json, const std::string& pointer, const PartitionProblem& problem) {
  LayerPartition spec;
  if (!json.is_object()) {
    problem(pointer, cat("expected an object {\"patterns\": [...], \"partition_type\": ...}, found ", shown(json)));
    return spec;
  }
  PartitionObject object(json, pointer, problem);
  object.field("patterns", spec.patterns);
  read_type(object, spec.type);
  const ordered_json* const shape = object.find("shape");
  if (shape != nullptr && !read_shape(*shape, spec.shape)) {
    object.wrong("shape", "a list of positive integers and -1, in which the cut dimension may be a list of sizes");
  }
  object.field("partition_dim", spec.partition_dim);
  object.field("model_types", spec.model_types);
  object.field("gather_output", spec.gather_output);
  object.field("grad_allreduce", spec.grad_allreduce);
  object.finish();
  if (spec.patterns.empty()) problem(object.at("patterns"), "expected at least one pattern, found none");
  for (size_t i = 0; i < spec.patterns.size(); ++i) {
    check_pattern(spec.patterns[i], cat(object.at("patterns"), "/", i), problem);
  }
  check_partition_dim(spec, object, problem);
  if (spec.gather_output && spec.type != PartitionType::kColumn) {
    problem(object.at("gather_output"), "belongs to partition_type column; the outputs of others are whole already");
  }
  if (spec.grad_allreduce && spec.type != PartitionType::kSkip) {
    problem(object.at("grad_allreduce"), "belongs to partition_type skip; remove it");
  }
  return spec;
}

void read_tp_plan(PartitionObject& object, std::vector<std::pair<std::string, std::string>>& out) {
  const ordered_json* const plan = object.find("tp_plan");
  if (plan == nullptr) return;
  if (!plan->is_object()) return object.wrong("tp_plan", "an object {\"layers.*.self_attn.q_proj\": \"colwise\", ...}");
  for (const auto& entry : plan->items()) {
    std::string style;
    if (!convert(entry.value(), style)) return object.wrong("tp_plan", "a style, as \"colwise\", for each name");
    out.emplace_back(entry.key(), style);
  }
}

}  // namespace

const char* name_of(PartitionType type) {
  static constexpr const char* kNames[] = {"column", "row", "skip"};
  return kNames[static_cast<size_t>(type)];
}

PartitionConfig read_partition_config(const ordered_json& json, const PartitionProblem& problem) {
  PartitionConfig config;
  if (json.is_null()) return config;
  if (!json.is_object()) {
    problem(kRoot, cat("expected an object with layer_specs, found ", shown(json)));
    return config;
  }
  PartitionObject object(json, kRoot, problem);
  object.field("tp_size", config.tp_size);
  if (config.tp_size < 1) object.wrong("tp_size", "an integer of at least 1");
  const ordered_json* const specs = object.find("layer_specs");
  if (specs != nullptr && !specs->is_array()) object.wrong("layer_specs", "a list");
  for (size_t i = 0; specs != nullptr && specs->is_array() && i < specs->size(); ++i) {
    config.layer_specs.push_back(read_layer((*specs)[i], cat(object.at("layer_specs"), "/", i), problem));
  }
  object.field("embedding_partition_dim", config.embedding_partition_dim);
  const int64_t dim = config.embedding_partition_dim.value_or(0);
  if (dim != 0 && dim != 1) object.wrong("embedding_partition_dim", "0 or 1");
  object.field("lm_head_patterns", config.lm_head_patterns);
  for (const std::string& pattern : config.lm_head_patterns) {
    check_pattern(pattern, object.at("lm_head_patterns"), problem);
  }
  object.field("use_default_specs", config.use_default_specs);
  object.field("strict_mode", config.strict_mode);
  read_tp_plan(object, config.tp_plan);
  object.finish();
  return config;
}

}  // namespace ds::engine::config
