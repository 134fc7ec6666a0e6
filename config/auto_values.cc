#include "config/auto_values.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/json/json_convert.h"
#include "core/json/near_miss.h"
#include "core/json/parse_json.h"

namespace ds::engine::config {
namespace {

using nlohmann::ordered_json;
using AutoValue = JsonReading::AutoValue;

// One of AutoValues: its name, and the keys that may be "auto" for it.
struct Entry {
  std::string name;
  std::vector<std::string> pointers;
  ordered_json (*get)(const AutoValues&);  // null: not given
  bool (*set)(AutoValues&, const ordered_json&);
  std::string expected;
};

template <auto kMember>
Entry entry(const char* name, const std::vector<std::string>& pointers) {
  using Value = typename std::remove_reference_t<decltype(std::declval<AutoValues>().*kMember)>::value_type;
  return {.name = name,
          .pointers = pointers,
          .get = [](const AutoValues& v) { return v.*kMember ? ordered_json(*(v.*kMember)) : ordered_json(nullptr); },
          .set =
              [](AutoValues& v, const ordered_json& json) {
                Value value{};
                if (!convert(json, value)) return false;
                v.*kMember = value;
                return true;
              },
          .expected = wanted(Value{})};
}

const std::vector<Entry>& entries() {
  static const std::vector<Entry> kEntries = {
      entry<&AutoValues::train_batch_size>("train_batch_size", {"/train_batch_size"}),
      entry<&AutoValues::train_micro_batch_size_per_gpu>("train_micro_batch_size_per_gpu",
                                                         {"/train_micro_batch_size_per_gpu"}),
      entry<&AutoValues::gradient_accumulation_steps>("gradient_accumulation_steps", {"/gradient_accumulation_steps"}),
      entry<&AutoValues::gradient_clipping>("gradient_clipping", {"/gradient_clipping"}),
      entry<&AutoValues::lr>("lr", {"/optimizer/params/lr"}),
      entry<&AutoValues::betas>("betas", {"/optimizer/params/betas"}),
      entry<&AutoValues::eps>("eps", {"/optimizer/params/eps"}),
      entry<&AutoValues::weight_decay>("weight_decay", {"/optimizer/params/weight_decay"}),
      entry<&AutoValues::warmup_min_lr>("warmup_min_lr", {"/scheduler/params/warmup_min_lr"}),
      entry<&AutoValues::warmup_max_lr>("warmup_max_lr", {"/scheduler/params/warmup_max_lr"}),
      entry<&AutoValues::warmup_num_steps>("warmup_num_steps", {"/scheduler/params/warmup_num_steps"}),
      entry<&AutoValues::total_num_steps>("total_num_steps", {"/scheduler/params/total_num_steps"}),
      entry<&AutoValues::fp16>("fp16", {"/fp16/enabled"}),
      entry<&AutoValues::bf16>("bf16", {"/bf16/enabled", "/bfloat16/enabled"}),
      entry<&AutoValues::nvme_path>("nvme_path", {"/zero_optimization/offload_param/nvme_path",
                                                  "/zero_optimization/offload_optimizer/nvme_path"}),
      entry<&AutoValues::hidden_size>("hidden_size", {}),
  };
  return kEntries;
}

// "optimizer.params.lr"
std::string dotted(const std::string& pointer) {
  std::string path = pointer.substr(1);
  std::replace(path.begin(), path.end(), '/', '.');
  return path;
}

// null: nothing is said of it.
ordered_json value_at(const std::string& pointer, const AutoValues& values) {
  for (const Entry& entry : entries()) {
    if (std::find(entry.pointers.begin(), entry.pointers.end(), pointer) == entry.pointers.end()) continue;
    ordered_json value = entry.get(values);
    const bool follows_lr = value.is_null() && entry.name == "warmup_max_lr" && values.lr;
    return follows_lr ? ordered_json(*values.lr) : value;
  }
  return nullptr;
}

// Stage 3's sizes as the Hugging Face integration computes them.
std::optional<AutoValue> from_hidden_size(const std::string& pointer, int64_t hidden) {
  const char* source = "computed from hidden_size";
  if (pointer == "/zero_optimization/reduce_bucket_size") return AutoValue{hidden * hidden, source};
  if (pointer == "/zero_optimization/stage3_prefetch_bucket_size") {
    return AutoValue{static_cast<int64_t>(0.9 * static_cast<double>(hidden) * static_cast<double>(hidden)), source};
  }
  if (pointer == "/zero_optimization/stage3_param_persistence_threshold") return AutoValue{10 * hidden, source};
  return std::nullopt;
}

// "1e-4", "[0.9, 0.95]" and "true" are JSON; anything else is text, which converts as in a file.
ordered_json json_of(const std::string& text) {
  auto value = parse_json<ordered_json>(text, nullptr, false);
  return value.is_discarded() ? ordered_json(text) : value;
}

}  // namespace

void set_auto_value(AutoValues& values, const std::string& key, const std::string& text) {
  std::vector<std::string> names;
  for (const Entry& entry : entries()) {
    names.push_back(entry.name);
    const auto is_key = [&key](const std::string& pointer) { return dotted(pointer) == key; };
    if (entry.name != key && std::none_of(entry.pointers.begin(), entry.pointers.end(), is_key)) continue;
    require<ConfigError>(entry.set(values, json_of(text)), key, ": expected ", entry.expected, ", found ", text);
    constexpr int64_t kWidest = int64_t{1} << 24;  // its square is a number of elements
    const int64_t hidden = values.hidden_size.value_or(1);
    require<ConfigError>(hidden > 0 && hidden <= kWidest, key, ": expected 1 to ", kWidest, ", found ", hidden);
    return;
  }
  std::string known;
  for (const std::string& name : names) known += cat(known.empty() ? "" : ", ", name);
  const auto meant = near_miss(key, names);
  throw ConfigError(cat(key, ": is no value that a program gives for \"auto\"; ",
                        meant ? cat("did you mean ", *meant, "?") : cat("expected one of ", known)));
}

// But for the folder, which no trainer gives; this is the one of its documents.
AutoValues hugging_face_values() {
  AutoValues values;
  values.nvme_path = "/local_nvme";
  values.train_micro_batch_size_per_gpu = 8;
  values.gradient_accumulation_steps = 1;
  values.gradient_clipping = 1.0;
  values.lr = 5e-5;
  values.betas = {0.9, 0.999};
  values.eps = 1e-8;
  values.weight_decay = 0.0;
  values.warmup_min_lr = 0.0;
  values.warmup_num_steps = 0;
  values.total_num_steps = 1000;
  values.fp16 = false;
  values.bf16 = false;
  return values;
}

std::vector<std::string> unused_auto_values(const DsConfig& config, const AutoValues& values) {
  const auto is_auto = [&config](const std::string& pointer) {
    const auto has_path = [path = dotted(pointer)](const ResolvedAuto& entry) { return entry.path == path; };
    return std::any_of(config.resolved_auto.begin(), config.resolved_auto.end(), has_path);
  };
  std::vector<std::string> unused;
  for (const Entry& entry : entries()) {
    if (entry.get(values).is_null() || entry.pointers.empty()) continue;
    const bool lr_of_schedule = entry.name == "lr" && is_auto("/scheduler/params/warmup_max_lr");
    if (std::none_of(entry.pointers.begin(), entry.pointers.end(), is_auto) && !lr_of_schedule) {
      unused.push_back(dotted(entry.pointers.front()));
    }
  }
  return unused;
}

std::optional<AutoValue> resolve_auto(const std::string& pointer, const ParseOptions& options,
                                      const ordered_json& root) {
  const AutoValues& values = options.auto_values;
  ordered_json given = value_at(pointer, values);
  if (!given.is_null()) return AutoValue{std::move(given), "the program"};
  if (values.hidden_size && root.value(ordered_json::json_pointer("/zero_optimization/stage"), ordered_json(0)) == 3) {
    if (auto computed = from_hidden_size(pointer, *values.hidden_size)) return computed;
  }
  const ordered_json::json_pointer lr("/optimizer/params/lr");
  if (pointer == "/scheduler/params/warmup_max_lr" && root.contains(lr) && root[lr].is_number()) {
    return AutoValue{root[lr], "optimizer.params.lr"};
  }
  // Batch sizes belong together: they are assumed when it is known which of them the file has.
  const auto is_batch_size = [&pointer](const char* key) { return pointer == key; };
  static constexpr const char* kBatchSizes[] = {"/train_batch_size", "/train_micro_batch_size_per_gpu",
                                                "/gradient_accumulation_steps"};
  if (!options.assumed_values || std::any_of(std::begin(kBatchSizes), std::end(kBatchSizes), is_batch_size)) {
    return std::nullopt;
  }
  // The program's learning rate goes before one that is assumed.
  AutoValues assumed = *options.assumed_values;
  if (values.lr) assumed.lr = values.lr;
  given = value_at(pointer, assumed);
  if (given.is_null()) return std::nullopt;
  return AutoValue{std::move(given), kAssumed};
}

}  // namespace ds::engine::config
