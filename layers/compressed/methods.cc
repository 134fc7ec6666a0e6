#include "layers/compressed/methods.h"

#include <algorithm>
#include <charconv>
#include <exception>
#include <limits>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/check.h"
#include "core/json/json_convert.h"
#include "core/name_pattern.h"

namespace ds::model_compression {
namespace {

using Json = nlohmann::ordered_json;

// Reads keys of one object; what is wrong is told, and keeps the default.
class Keys {
 public:
  Keys(std::string path, const Json& object, const AddProblem& add)
      : path_(std::move(path)), object_(object), add_(add) {
    if (!object.is_object()) add_(path_, cat("expected an object, found ", shown(object)), true);
  }
  // Keys without a default are reported as missing.
  int64_t integer(const char* key, std::optional<int64_t> by_default, int64_t least,
                  int64_t most = std::numeric_limits<int64_t>::max()) {
    const Json* const json = find(key, by_default.has_value());
    int64_t value = by_default.value_or(least);
    if (json == nullptr) return value;
    int64_t found = 0;
    if (json->is_boolean() || !convert(*json, found) || found < least || found > most) {
      const std::string wanted =
          most == std::numeric_limits<int64_t>::max() ? cat("an integer >= ", least) : cat(least, " to ", most);
      problem(key, cat("expected ", wanted, ", found ", shown(*json)));
      return value;
    }
    return found;
  }
  double ratio(const char* key, std::optional<double> by_default = std::nullopt) {
    const Json* const json = find(key, by_default.has_value());
    double found = 1;
    if (json == nullptr) return by_default.value_or(1);
    if (json->is_boolean() || !convert(*json, found) || !(found > 0 && found <= 1)) {
      problem(key, cat("expected a ratio in (0, 1], found ", shown(*json)));
      return by_default.value_or(1);
    }
    return found;
  }
  bool boolean(const char* key, bool by_default) {
    const Json* const json = find(key, /*has_default=*/true);
    bool found = by_default;
    if (json != nullptr && !convert(*json, found)) problem(key, cat("expected true or false, found ", shown(*json)));
    return found;
  }
  std::string word(const char* key, const std::vector<std::string>& words) {
    const Json* const json = find(key, /*has_default=*/true);
    if (json == nullptr) return words.front();
    for (const std::string& known : words) {
      if (*json == known) return known;
    }
    std::string all;
    for (const std::string& known : words) all += cat(all.empty() ? "" : ", ", known);
    problem(key, cat("expected one of ", all, ", found ", shown(*json)));
    return words.front();
  }
  std::vector<std::string> patterns(const char* key) {
    const Json* const json = find(key, /*has_default=*/true);
    if (json == nullptr) return {};
    if (json->is_string()) return checked(key, {json->get<std::string>()});
    std::vector<std::string> result;
    if (!convert(*json, result)) {
      problem(key, cat("expected a list of regular expressions of module names, found ", shown(*json)));
      return {};
    }
    return checked(key, std::move(result));
  }
  const Json* find(const char* key, bool has_default) {
    known_.emplace_back(key);
    if (!object_.is_object()) return nullptr;
    const auto found = object_.find(key);
    if (found != object_.end()) return &*found;
    if (!has_default) problem(key, "expected a value, found none");
    return nullptr;
  }
  std::vector<std::string> checked(const char* key, std::vector<std::string> patterns) {
    for (const std::string& pattern : patterns) {
      const std::string reason = pattern == "*" ? "" : regex_problem(pattern);
      if (reason.empty()) continue;
      problem(key, cat("expected a regular expression (or \"*\" for all modules), found ", pattern, ": ", reason));
    }
    return patterns;
  }
  void problem(const std::string& key, const std::string& message) { add_(cat(path_, ".", key), message, true); }
  // Whatever no call has asked for.
  void finish() {
    if (!object_.is_object()) return;
    for (const auto& item : object_.items()) {
      if (std::find(known_.begin(), known_.end(), item.key()) != known_.end()) continue;
      std::string all;
      for (const std::string& known : known_) all += cat(all.empty() ? "" : ", ", known);
      add_(cat(path_, ".", item.key()), cat("unknown key, ignored; known are ", all), false);
    }
  }
  const std::string& path() const { return path_; }

 private:
  const std::string path_;
  const Json& object_;
  const AddProblem& add_;
  std::vector<std::string> known_;
};

void read_weight_quantization(Keys& shared, Rule& rule) {
  rule.schedule_offset = shared.integer("schedule_offset", 0, 0);
  rule.groups = shared.integer("quantize_groups", 1, 1);
  rule.symmetric = shared.word("quantization_type", {"symmetric", "asymmetric"}) == "symmetric";
  rule.stochastic = shared.word("rounding", {"nearest", "stochastic"}) == "stochastic";
  shared.boolean("quantize_verbose", false);            // DeepSpeed prints what it does
  shared.boolean("quantizer_kernel", false);            // the same values by another kernel
  shared.boolean("quantize_weight_in_forward", false);  // they always are: the optimizer's weights stay as they are
  const Json* const mixed = shared.find("fp16_mixed_quantize", /*has_default=*/true);
  if (mixed == nullptr) return;
  if (!mixed->is_object())
    return shared.problem("fp16_mixed_quantize", cat("expected an object, found ", shown(*mixed)));
  bool enabled = false;
  double ratio = 0.001;
  if (mixed->contains("enabled") && !convert((*mixed)["enabled"], enabled)) {
    shared.problem("fp16_mixed_quantize.enabled", cat("expected true or false, found ", shown((*mixed)["enabled"])));
  }
  if (mixed->contains("quantize_change_ratio") &&
      (!convert((*mixed)["quantize_change_ratio"], ratio) || !(ratio > 0 && ratio <= 1))) {
    shared.problem("fp16_mixed_quantize.quantize_change_ratio",
                   cat("expected a ratio in (0, 1], found ", shown((*mixed)["quantize_change_ratio"])));
  }
  if (enabled) rule.bits.mixed_ratio = ratio;
}

void read_activation_quantization(Keys& shared, Rule& rule) {
  rule.schedule_offset = shared.integer("schedule_offset", 1000, 0);
  rule.symmetric = shared.word("quantization_type", {"symmetric", "asymmetric"}) == "symmetric";
  rule.static_range = shared.word("range_calibration", {"dynamic", "static"}) == "static";
}

// "4x1": rows x columns.
std::optional<BlockSize> block_named(const std::string& text) {
  BlockSize block;
  const size_t cross = text.find('x');
  if (cross == std::string::npos) return std::nullopt;
  const auto number = [](std::string_view digits, int64_t& value) {
    const char* const begin = digits.data();
    const char* const end = begin + digits.size();
    const auto [read, failure] = std::from_chars(begin, end, value);
    return failure == std::errc() && read == end && value > 0;
  };
  const std::string_view view = text;
  if (!number(view.substr(0, cross), block.rows) || !number(view.substr(cross + 1), block.columns)) return std::nullopt;
  return block;
}

void read_snip(Keys& shared, Rule& rule, int64_t end) {
  SnipSchedule snip{.last = end, .stride = shared.integer("schedule_offset_stride", 1, 1), .block = {}};
  rule.dense_ratio = shared.ratio("dense_ratio", 0.1);
  if (rule.dense_ratio == 1) shared.problem("dense_ratio", "expected less than 1, found 1, which prunes nothing");
  if (const Json* const pattern = shared.find("block_pattern", /*has_default=*/true)) {
    const auto block = pattern->is_string() ? block_named(pattern->get<std::string>()) : std::nullopt;
    if (!block) shared.problem("block_pattern", cat("expected rows x columns, as \"4x1\", found ", shown(*pattern)));
    snip.block = block.value_or(BlockSize());
  }
  if (rule.schedule_offset == 0 && snip.last < snip.stride) {
    shared.problem("schedule_offset",
                   "expected at least 1 where masks are decided once (schedule_offset_end), found "
                   "0: no gradient has been seen before step 0");
  }
  rule.snip = snip;
}

void read_pruning(Keys& shared, Rule& rule) {
  rule.schedule_offset = shared.integer("schedule_offset", 1000, 0);
  if (rule.method == Method::kHeadPruning) {
    rule.learns_scores = shared.word("method", {"topk", "l1"}) == "topk";
    rule.heads = shared.integer("num_heads", std::nullopt, 1);
    return;
  }
  if (rule.method != Method::kSparsePruning) {
    rule.learns_scores = shared.word("method", {"l1", "topk"}) == "topk";
    return;
  }
  const std::string method = shared.word("method", {"l1", "topk", "snip_momentum"});
  rule.learns_scores = method == "topk";
  const int64_t end = shared.integer("schedule_offset_end", rule.schedule_offset, 0);
  if (end < rule.schedule_offset) {
    shared.problem("schedule_offset_end",
                   cat("expected at least schedule_offset, ", rule.schedule_offset, ", found ", end));
  }
  rule.excluded = shared.patterns("excluded_modules");
  if (method == "snip_momentum") return read_snip(shared, rule, end);
  for (const char* of_snip : {"schedule_offset_stride", "block_pattern", "dense_ratio"}) shared.find(of_snip, true);
}

void read_shared(Keys& shared, Rule& rule) {
  shared.boolean("enabled", false);
  switch (rule.method) {
    case Method::kWeightQuantization:
      return read_weight_quantization(shared, rule);
    case Method::kActivationQuantization:
      return read_activation_quantization(shared, rule);
    default:
      return read_pruning(shared, rule);
  }
}

void read_params(Keys& params, Rule& rule) {
  if (rule.method == Method::kActivationQuantization) {
    rule.bits.start = rule.bits.target = params.integer("bits", std::nullopt, 4, 8);
    if (rule.bits.start != 4 && rule.bits.start != 8) {
      params.problem("bits", cat("expected 4 or 8, found ", rule.bits.start));
    }
    return;
  }
  if (rule.method != Method::kWeightQuantization) {
    rule.dense_ratio = params.ratio("dense_ratio");
    return;
  }
  rule.bits.start = params.integer("start_bits", std::nullopt, 1, 16);
  rule.bits.target = params.integer("target_bits", std::nullopt, 1, 16);
  rule.bits.period = params.integer("quantization_period", 1, 0);
  if (rule.bits.target > rule.bits.start) {
    params.problem("target_bits", cat("expected at most start_bits, ", rule.bits.start, ", found ", rule.bits.target));
  }
  if (rule.bits.target < 3 && (!rule.symmetric || rule.stochastic)) {
    params.problem(
        "target_bits",
        cat("expected at least 3 with ", rule.symmetric ? "stochastic rounding" : "asymmetric", " quantisation, found ",
            rule.bits.target, ": ternary and binary weights are symmetric, and rounded to the nearest"));
  }
}

void read_related(Keys& group, const Json& json, Rule& rule) {
  if (json.is_null()) return;
  const bool cuts = rule.method == Method::kRowPruning || rule.method == Method::kHeadPruning ||
                    rule.method == Method::kChannelPruning;
  if (!convert(json, rule.related)) {
    return group.problem(
        "related_modules",
        cat("expected a list of lists of regular expressions, one list for each of modules, found ", shown(json)));
  }
  if (!cuts)
    return group.problem("related_modules",
                         cat("expected none with ", name_of(rule.method), ", which cuts no dimension"));
  if (rule.related.size() != rule.modules.size()) {
    group.problem("related_modules", cat("expected as many lists as modules has entries, ", rule.modules.size(),
                                         ", found ", rule.related.size()));
  }
  for (const auto& patterns : rule.related) group.checked("related_modules", patterns);
}

Rule read_group(const Rule& shared, const std::string& name, const Json& json, const AddProblem& add) {
  Rule rule = shared;
  Keys group(cat(name_of(rule.method), ".different_groups.", name), json, add);
  rule.path = cat("compression_training.", group.path());
  rule.modules = group.patterns("modules");
  if (rule.modules.empty()) rule.modules = {"*"};
  const Json* const params = group.find("params", /*has_default=*/false);
  if (params != nullptr) {
    Keys keys(cat(group.path(), ".params"), *params, add);
    read_params(keys, rule);
    keys.finish();
  }
  if (const Json* const related = group.find("related_modules", /*has_default=*/true))
    read_related(group, *related, rule);
  group.finish();
  return rule;
}

}  // namespace

const char* name_of(Method method) {
  switch (method) {
    case Method::kWeightQuantization:
      return "weight_quantization";
    case Method::kActivationQuantization:
      return "activation_quantization";
    case Method::kSparsePruning:
      return "sparse_pruning";
    case Method::kRowPruning:
      return "row_pruning";
    case Method::kHeadPruning:
      return "head_pruning";
    case Method::kChannelPruning:
      return "channel_pruning";
  }
  return "";
}

namespace {

struct BitsNow {
  int64_t bits;
  int64_t last_change;  // the quantisation, counted from 1, that had them first; 0: the first ones
};

BitsNow bits_of(const BitSchedule& schedule, int64_t step) {
  const int64_t done = step + 1;  // quantisations, this one included
  BitsNow now{schedule.start, 0};
  int64_t due = schedule.period;
  while (now.bits > schedule.target) {
    const int64_t at = std::max(due, now.last_change + 1);  // one bit at a time
    if (at > done) break;
    --now.bits;
    now.last_change = at;
    if (due > std::numeric_limits<int64_t>::max() / 2) break;
    due *= 2;
  }
  return now;
}

}  // namespace

int64_t bits_at(const BitSchedule& schedule, int64_t step) { return bits_of(schedule, step).bits; }

double float_share_at(const BitSchedule& schedule, int64_t step) {
  if (schedule.mixed_ratio == 0) return 0;
  const int64_t since = step + 1 - bits_of(schedule, step).last_change;
  return std::max(0.0, 1.0 - schedule.mixed_ratio * static_cast<double>(since));
}

std::vector<Rule> read_method(Method method, const Json& shared, const Json& groups, const AddProblem& add) {
  Keys keys(cat(name_of(method), ".shared_parameters"), shared, add);
  bool enabled = false;
  if (!shared.is_object() || !shared.contains("enabled") || !convert(shared["enabled"], enabled) || !enabled) return {};
  Rule rule{.method = method};
  read_shared(keys, rule);
  keys.finish();
  std::vector<Rule> rules;
  if (rule.snip) {
    if (groups.is_object() && !groups.empty()) {
      add(cat(name_of(method), ".different_groups"),
          "ignored with snip_momentum, which prunes all layers but excluded_modules by one ranking", false);
    }
    rule.path = cat("compression_training.", name_of(method), ".shared_parameters");
    rule.modules = {"*"};
    return {rule};
  }
  if (!groups.is_object() || groups.empty()) {
    add(cat(name_of(method), ".different_groups"),
        "expected at least one group, {\"NAME\": {\"params\": {...}, \"modules\": [...]}}, since the method is enabled",
        true);
    return rules;
  }
  for (const auto& item : groups.items()) rules.push_back(read_group(rule, item.key(), item.value(), add));
  return rules;
}

}  // namespace ds::model_compression
