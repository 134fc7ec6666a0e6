#include <array>
#include <string_view>

#include "config/sections_without_effect.h"
#include "config/supported.h"
#include "core/check.h"
#include "core/json/json_convert.h"
#include "dsengine/config.h"
#include "optim/optimizer_table.h"

namespace ds::engine::config {
namespace {

class Collector {
 public:
  void add(bool enabled, const std::string& path, const std::string& message) {
    if (enabled) features_.push_back({path, message});
  }
  // A feature that comes with a later version.
  void later(bool enabled, const std::string& path, const std::string& instead) {
    add(enabled, path, cat("not in this version; ", instead));
  }
  std::vector<UnsupportedFeature> take() { return std::move(features_); }

 private:
  std::vector<UnsupportedFeature> features_;
};

void collect_zero(const ZeroSection& s, Collector& out) {
  const std::string z = "zero_optimization.";
  out.later(s.zenflow.has_value(), z + "zenflow",
            "remove it; offload_optimizer.super_offload updates on the host beside backward with the same results, "
            "offload_optimizer.delayed_update beside the next step with gradients one update old");
  out.later(s.zeropp_loco_param.has_value(), z + "zeropp_loco_param",
            "remove it (DeepSpeed has removed LoCo too); gradient_compression in place of zero_quantized_gradients "
            "adds what was not sent to the next gradient (error_feedback)");
}

void collect_optimizer(const DsConfig& c, Collector& out) {
  const bool is_known = !c.optimizer.given() || optimizers::find_optimizer(c.optimizer.type) != nullptr;
  out.later(!is_known, "optimizer.type",
            cat(c.optimizer.type, " is not available; use ",
                optimizers::optimizer_names([](const optimizers::OptimizerDescription&) { return true; })));
  out.later(c.scheduler.given() && !c.scheduler.options, "scheduler.type",
            cat(c.scheduler.type,
                " takes a function, which no file can hold; use another one, as OneCycle or "
                "CosineAnnealingLR, or give the program's own schedule (.lr_scheduler)"));
}

bool compresses_layers(const CompressionTrainingSection& s) {
  return s.layer_reduction.enabled || s.weight_quantization.enabled || s.activation_quantization.enabled ||
         s.sparse_pruning.enabled || s.row_pruning.enabled || s.head_pruning.enabled || s.channel_pruning.enabled;
}

void collect_precision(const DsConfig& c, Collector& out) {
  out.later(c.fp8.enabled && compresses_layers(c.compression_training), "fp8 with compression_training",
            "turn one of them off");
  bool amp = false;
  const nlohmann::ordered_json& section = without_effect_of(c).amp;
  if (section.is_object() && section.contains("enabled")) ds::convert(section["enabled"], amp);
  out.add(amp, "amp", "NVIDIA Apex is a Python package; use fp16, bf16 or torch_autocast");
}

void collect_parallel(const DsConfig& c, Collector& out) {
  out.later(c.expert_parallel.enabled, "expert_parallel",
            "turn it off: experts train as any other parameters, partitioned by zero_optimization.stage; DeepSpeed's "
            "section finds mixtures of experts by Python classes");
  if (c.sequence_ranks() == 1) return;
  const auto beside = [&](bool on, const char* key, const char* instead) {
    out.later(on, cat("sequence_parallel_size with ", key), instead);
  };
  beside(c.tensor_parallel.size() > 1, "tensor_parallel.autotp_size",
         "set one of them to 1; tensor_parallel.sequence_parallel cuts activations along the sequence between layers");
  beside(c.optimizer.compresses(), "optimizer.type",
         "a rank's own gradients are those of a piece of its sequences, which the optimizer would take for a whole "
         "gradient; use Adam or Lamb");
  const DataEfficiencySection& data = c.data_efficiency;
  beside(data.enabled && data.data_routing.enabled && data.data_routing.random_ltd.enabled,
         "data_efficiency.data_routing.random_ltd",
         "turn it off: it leaves out positions, of which a rank has a piece");
  beside(c.sparse_attention.has_value(), "sparse_attention",
         "remove it: its patterns are of whole sequences; ring_attention skips blocks that see nothing of one another");
}

void collect_compression(const DsConfig& c, Collector& out) {
  const nlohmann::ordered_json& sparse = c.compression_training.sparse_pruning.shared_parameters;
  const bool is_snip = c.compression_training.sparse_pruning.enabled && sparse.is_object() &&
                       sparse.value("method", nlohmann::ordered_json()) == "snip_momentum";
  out.add(is_snip && c.optimizer.compresses(), "compression_training.sparse_pruning.shared_parameters.method",
          cat("snip_momentum chooses by mean gradients of all ranks, which ", c.optimizer.type,
              " does not make; use topk or l1, or another optimizer"));
}

void collect_features(const DsConfig& c, Collector& out) {
  const DataEfficiencySection& data = c.data_efficiency;
  out.later(data.enabled && data.data_sampling.enabled && data.data_sampling.dynamic_batching.enabled,
            "data_efficiency.data_sampling.dynamic_batching",
            "turn it off; batches have train_micro_batch_size_per_gpu samples each");
  const RandomLtdSection& ltd = data.data_routing.random_ltd;
  out.later(data.enabled && data.data_routing.enabled && ltd.enabled && ltd.layer_token_lr_schedule.enabled,
            "data_efficiency.data_routing.random_ltd.layer_token_lr_schedule", "turn it off, as DeepSpeed asks");
  out.later(c.autotuning.enabled, "autotuning",
            "turn it off: it starts a Python program many times; ds-tool check --parameters predicts the memory of a "
            "config, ds-tool simulate its time, without a run");
  const SectionsWithoutEffect& sections = without_effect_of(c);
  out.add(sections.weight_quantization && !sections.weight_quantization->quantized_initialization.empty(),
          "weight_quantization.quantized_initialization",
          "makes sense for inference alone: weights of Linear and Embedding layers become integers as they are made, "
          "which no gradient changes; remove it");
  out.later(sections.eigenvalue.enabled, "eigenvalue",
            "turn it off: it chooses periods for quantize_training alone (DeepSpeed has removed both); "
            "compression_training.weight_quantization has a quantization_period for each group of layers");
  out.later(sections.quantize_training.is_object(), "quantize_training",
            "remove it (DeepSpeed has removed it too) and write compression_training.weight_quantization: start_bits, "
            "target_bits and quantization_period by layers, docs/model_compression.md");
  out.later(sections.graph_harvesting, "graph_harvesting",
            "use false: CUDA graphs of Python's forward, which DeepSpeed has removed too");
}

}  // namespace

std::vector<UnsupportedFeature> unsupported_features(const DsConfig& config) {
  Collector out;
  collect_zero(config.zero_optimization, out);
  collect_optimizer(config, out);
  collect_precision(config, out);
  collect_parallel(config, out);
  collect_compression(config, out);
  collect_features(config, out);
  return out.take();
}

void require_supported(const DsConfig& config) {
  const auto features = unsupported_features(config);
  if (features.empty()) return;
  std::string text = cat(config.source, ": valid, but asks for ", features.size(),
                         features.size() == 1 ? " feature" : " features", " that this build lacks");
  for (const UnsupportedFeature& feature : features) text += cat("\n  ", feature.path, ": ", feature.message);
  throw ConfigError(text);
}

}  // namespace ds::engine::config
