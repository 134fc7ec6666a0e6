#include "engine/config/auto_values.h"

namespace ds::engine::config {
namespace {

using nlohmann::ordered_json;
using AutoValue = JsonReading::AutoValue;

template <class T>
ordered_json json_of(const std::optional<T>& value) {
  return value ? ordered_json(*value) : ordered_json(nullptr);
}

// null: the program says nothing of it.
ordered_json from_program(const std::string& pointer, const AutoValues& v) {
  if (pointer == "/train_batch_size") return json_of(v.train_batch_size);
  if (pointer == "/train_micro_batch_size_per_gpu") return json_of(v.train_micro_batch_size_per_gpu);
  if (pointer == "/gradient_accumulation_steps") return json_of(v.gradient_accumulation_steps);
  if (pointer == "/gradient_clipping") return json_of(v.gradient_clipping);
  if (pointer == "/fp16/enabled") return json_of(v.fp16);
  if (pointer == "/bf16/enabled" || pointer == "/bfloat16/enabled") return json_of(v.bf16);
  if (pointer == "/optimizer/params/lr") return json_of(v.lr);
  if (pointer == "/optimizer/params/betas") return json_of(v.betas);
  if (pointer == "/optimizer/params/eps") return json_of(v.eps);
  if (pointer == "/optimizer/params/weight_decay") return json_of(v.weight_decay);
  if (pointer == "/scheduler/params/warmup_min_lr") return json_of(v.warmup_min_lr);
  if (pointer == "/scheduler/params/warmup_max_lr") return json_of(v.warmup_max_lr ? v.warmup_max_lr : v.lr);
  if (pointer == "/scheduler/params/warmup_num_steps") return json_of(v.warmup_num_steps);
  if (pointer == "/scheduler/params/total_num_steps") return json_of(v.total_num_steps);
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

}  // namespace

std::optional<AutoValue> resolve_auto(const std::string& pointer, const AutoValues& values, const ordered_json& root) {
  ordered_json given = from_program(pointer, values);
  if (!given.is_null()) return AutoValue{std::move(given), "the program"};
  if (values.hidden_size && root.value(ordered_json::json_pointer("/zero_optimization/stage"), ordered_json(0)) == 3) {
    return from_hidden_size(pointer, *values.hidden_size);
  }
  const ordered_json::json_pointer lr("/optimizer/params/lr");
  if (pointer == "/scheduler/params/warmup_max_lr" && root.contains(lr) && root[lr].is_number()) {
    return AutoValue{root[lr], "optimizer.params.lr"};
  }
  return std::nullopt;
}

}  // namespace ds::engine::config
