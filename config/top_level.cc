#include <algorithm>
#include <memory>
#include <utility>

#include "comm/backend.h"
#include "config/describe.h"
#include "core/ascii.h"
#include "core/check.h"

namespace ds::engine::config {
namespace {

const JsonFields::Names<comm::Backend>& backend_names() {
  static const JsonFields::Names<comm::Backend> kNames = [] {
    JsonFields::Names<comm::Backend> made;
    for (size_t i = 0; i < comm::kBackendNames.size(); ++i) {
      made.emplace_back(comm::kBackendNames[i], static_cast<comm::Backend>(i));
    }
    return made;
  }();
  return kNames;
}

const JsonFields::Names<DType>& communication_dtype_names() {
  static const JsonFields::Names<DType> kNames = {
      {"fp16", DType::kFloat16}, {"bf16", DType::kBFloat16}, {"fp32", DType::kFloat32}};
  return kNames;
}

// A bool here is Megatron-LM's key, which is another one.
void describe_sequences(JsonFields& json, DsConfig& c) {
  constexpr const char* kKey = "sequence_parallel";
  const nlohmann::ordered_json* value = json.keys().peek(kKey);
  if (value == nullptr || !value->is_boolean()) {
    return json.section(kKey, c.sequence_parallel, describe, UnknownKeys::kRefuse);
  }
  json.keys().declare(kKey);
  json.error(kKey,
             cat("expected an object {\"attention\", \"order\", \"dimension\"} beside sequence_parallel_size, found ",
                 shown(*value), "; the switch of Megatron-LM is tensor_parallel.sequence_parallel"));
}

void describe_run(JsonFields& json, DsConfig& c) {
  json.field("managed_gradient_accumulation", c.managed_gradient_accumulation);
  json.field("dataloader_drop_last", c.dataloader_drop_last);
  json.field("sequence_parallel_size", c.sequence_parallel_size, above(0));
  describe_sequences(json, c);
  json.field("data_parallel_size", c.data_parallel_size, above(0));
  json.field("use_data_before_expert_parallelism", c.use_data_before_expert_parallelism);
  json.section("optimizer", c.optimizer, describe, UnknownKeys::kWarn);
  json.section("scheduler", c.scheduler, describe, UnknownKeys::kWarn);
  json.field("zero_allow_untested_optimizer", c.zero_allow_untested_optimizer);
  json.field("zero_force_ds_cpu_optimizer", c.zero_force_ds_cpu_optimizer);
}

void describe_precision(JsonFields& json, DsConfig& c) {
  json.section("fp16", c.fp16, describe, UnknownKeys::kRefuse);
  if (json.keys().has("bfloat16")) json.warning("bfloat16", "deprecated; use \"bf16\"");
  const bool old_spelling = json.keys().has("bfloat16") && !json.keys().has("bf16");
  if (old_spelling) {
    json.section("bfloat16", c.bf16, describe, UnknownKeys::kRefuse);
    json.keys().declare("bf16");
  } else {
    if (json.keys().has("bfloat16"))
      json.error("bfloat16", "is another name of \"bf16\", which is given too; remove one of them");
    json.section("bf16", c.bf16, describe, UnknownKeys::kRefuse);
    json.keys().declare("bfloat16");
  }
  json.section("fp8", c.fp8, describe, UnknownKeys::kRefuse);
  json.section("torch_autocast", c.torch_autocast, describe, UnknownKeys::kWarn);
  json.section("data_types", c.data_types, describe, UnknownKeys::kWarn);
}

// In any case, as DeepSpeed reads it.
void allreduce_op(JsonFields& json, GradientAllreduceOp& out) {
  static const JsonFields::Names<GradientAllreduceOp> kNames = {{"mean", GradientAllreduceOp::kMean},
                                                                {"sum", GradientAllreduceOp::kSum}};
  const nlohmann::ordered_json* value = json.find("gradient_allreduce_op");
  for (const auto& [name, op] : kNames) {
    if (value == nullptr || !value->is_string()) continue;
    if (!equal_in_any_case(value->get_ref<const std::string&>(), name)) continue;
    out = op;
    return;
  }
  json.enumerator("gradient_allreduce_op", out, kNames);
}

void describe_gradients(JsonFields& json, DsConfig& c) {
  json.field("gradient_clipping", c.gradient_clipping, at_least(0));
  if (const auto* value = json.keys().peek("gradient_clipping"); value != nullptr && value->is_boolean()) {
    json.warning("gradient_clipping",
                 cat("expected the largest norm, found ", shown(*value), ", which Python takes as ",
                     *value == true ? "1; write 1.0" : "0; write 0.0"));
  }
  json.field("gradient_clip_by_value", c.gradient_clip_by_value, at_least(0));
  json.field("prescale_gradients", c.prescale_gradients);
  json.field("gradient_predivide_factor", c.gradient_predivide_factor, above(0));
  allreduce_op(json, c.gradient_allreduce_op);
  json.enumerator("communication_data_type", c.communication_data_type, communication_dtype_names());
  json.section("gradient_compression", c.gradient_compression, describe, UnknownKeys::kRefuse);
  json.enumerator("non_finite_gradients", c.non_finite_gradients,
                  {{"auto", NonFiniteGradients::kAuto},
                   {"skip", NonFiniteGradients::kSkip},
                   {"error", NonFiniteGradients::kError},
                   {"continue", NonFiniteGradients::kContinue}});
  json.field("locate_non_finite", c.locate_non_finite);
  json.field("check_replicas", c.check_replicas, at_least(0));
  json.enumerator("seq_parallel_communication_data_type", c.seq_parallel_communication_data_type,
                  communication_dtype_names());
  json.field("disable_allgather", c.disable_allgather);
  json.enumerator("communication_backend", c.communication_backend, backend_names());
}

// Trainers write an infinite number for "never".
void steps_per_print(JsonFields& json, std::optional<int64_t>& out) {
  constexpr const char* kKey = "steps_per_print";
  const nlohmann::ordered_json* value = json.find(kKey);
  const std::string text = value != nullptr && value->is_string() ? value->get<std::string>() : "";
  if (!equal_in_any_case(text, kJsonInfinity) && !equal_in_any_case(text, "inf")) return json.field(kKey, out);
  out.reset();
  json.warning(kKey, cat("found ", text, ", which is taken as null: no line is written; write null"));
}

void describe_logging(JsonFields& json, DsConfig& c, SectionsWithoutEffect& other) {
  steps_per_print(json, c.steps_per_print);
  json.field("wall_clock_breakdown", c.wall_clock_breakdown);
  json.field("memory_breakdown", c.memory_breakdown);
  json.field("dump_state", c.dump_state);
  json.choice("log_level", c.log_level, {"debug", "info", "warning", "error", "critical"});
  json.field("vocabulary_size", c.vocabulary_size, above(0));
  json.field("disable_python_gc", c.disable_python_gc);
  json.section("timers", c.timers, describe, UnknownKeys::kWarn);
  json.section("flight_recorder", c.flight_recorder, describe, UnknownKeys::kRefuse);
  json.section("flops_profiler", c.flops_profiler, describe, UnknownKeys::kWarn);
  json.section("comms_logger", c.comms_logger, describe, UnknownKeys::kRefuse);
  json.section("tensorboard", c.tensorboard, describe, UnknownKeys::kRefuse);
  json.section("csv_monitor", c.csv_monitor, describe, UnknownKeys::kRefuse);
  json.section("metrics", c.metrics, describe, UnknownKeys::kRefuse);
  json.section("trace", c.trace, describe, UnknownKeys::kRefuse);
  json.section("wandb", other.wandb, describe, UnknownKeys::kRefuse);
  json.section("comet", other.comet, describe, UnknownKeys::kRefuse);
}

void describe_features(JsonFields& json, DsConfig& c, SectionsWithoutEffect& other) {
  json.section("activation_checkpointing", c.activation_checkpointing, describe, UnknownKeys::kWarn);
  json.section("aio", c.aio, describe, UnknownKeys::kWarn);
  json.section("checkpoint", c.checkpoint, describe, UnknownKeys::kWarn);
  json.section("pipeline", c.pipeline, describe, UnknownKeys::kWarn);
  json.section("tensor_parallel", c.tensor_parallel, describe, UnknownKeys::kRefuse);
  json.section("expert_parallel", c.expert_parallel, describe, UnknownKeys::kWarn);
  json.section("data_efficiency", c.data_efficiency, describe, UnknownKeys::kWarn);
  json.section("autotuning", c.autotuning, describe, UnknownKeys::kWarn);
  json.section("compile", other.compile, describe, UnknownKeys::kRefuse);
  json.section("hybrid_engine", other.hybrid_engine, describe, UnknownKeys::kRefuse);
  json.section("weight_quantization", other.weight_quantization, describe, UnknownKeys::kRefuse);
}

void describe_removed(JsonFields& json, DsConfig& c, SectionsWithoutEffect& other) {
  json.section("progressive_layer_drop", c.progressive_layer_drop, describe, UnknownKeys::kWarn);
  json.section("curriculum_learning", c.curriculum_learning, describe, UnknownKeys::kWarn);
  json.section("elasticity", c.elasticity, describe, UnknownKeys::kWarn);
  json.section("sparse_attention", c.sparse_attention, describe, UnknownKeys::kWarn);
  json.section("eigenvalue", other.eigenvalue, describe, UnknownKeys::kWarn);
  json.section("compression_training", c.compression_training, describe, UnknownKeys::kWarn);
  json.section("nebula", other.nebula, describe, UnknownKeys::kWarn);
  json.field("sparse_gradients", c.sparse_gradients);
  json.field("graph_harvesting", other.graph_harvesting);
  json.field("amp", other.amp);
  json.field("quantize_training", other.quantize_training);
  json.field("datastates_ckpt", other.datastates_ckpt);
}

void sdpa_backends(JsonFields& json, DsConfig& c) {
  constexpr const char* kKey = "sdpa_backends";
  json.field(kKey, c.sdpa_backends);
  if (!json.reading() || !c.sdpa_backends) return;
  static const std::vector<std::string> kKnown = {"cudnn", "flash", "efficient", "math"};
  const std::vector<std::string>& given = *c.sdpa_backends;
  for (size_t i = 0; i < given.size(); ++i) {
    const auto here = given.begin() + static_cast<std::ptrdiff_t>(i);
    if (std::find(kKnown.begin(), kKnown.end(), given[i]) == kKnown.end()) {
      json.error(kKey, cat("expected \"cudnn\", \"flash\", \"efficient\" and \"math\", found \"", given[i], "\""));
    } else if (std::find(given.begin(), here, given[i]) != here) {
      json.error(kKey, cat("has \"", given[i], "\" twice; remove one of them"));
    }
  }
  if (given.empty()) json.error(kKey, "expected at least one backend, found none; remove the key, or add \"math\"");
  if (c.deterministic && given == std::vector<std::string>{"cudnn"}) {
    json.error(kKey,
               "expected another backend than \"cudnn\" with \"deterministic\": true, which excludes cuDNN's, found "
               "none; add \"math\", or turn deterministic off");
  }
}

}  // namespace

void describe_top_level(JsonFields& json, DsConfig& c) {
  describe_run(json, c);
  describe_precision(json, c);
  describe_gradients(json, c);
  describe_zero_optimization(json, c);
  SectionsWithoutEffect other = without_effect_of(c);
  describe_logging(json, c, other);
  describe_features(json, c, other);
  describe_removed(json, c, other);
  if (json.reading()) c.without_effect = std::make_shared<const SectionsWithoutEffect>(std::move(other));
  json.field("seed", c.seed, at_least(0));
  json.field("deterministic", c.deterministic);
  json.field("sync_batchnorm", c.sync_batchnorm);
  json.field("broadcast_buffers", c.broadcast_buffers);
  json.choice("float32_matmul_precision", c.float32_matmul_precision, {"highest", "high", "medium"});
  sdpa_backends(json, c);
  json.field("strict", c.strict);
}

}  // namespace ds::engine::config
