// The ds_config: every section as a typed struct, checked and resolved. Torch-free.
//
// Keys, defaults and rules are those of DeepSpeed 0.19.8; sections it removed keep their spelling of 0.19.6. Keys
// that are ours are marked so in configs/README.md.
// Plain values without owners; a DsConfig that nobody changes is safe from any thread.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/comm.h"
#include "dsengine/config_efficiency.h"
#include "dsengine/config_runtime.h"
#include "dsengine/config_training.h"
#include "dsengine/config_zero.h"

namespace ds::engine::config {

// Where a ds_config comes from.
// Implicitly made from
//   * text: the path of a file, read as hjson (comments, trailing commas, unquoted keys, as DeepSpeed allows); when no
//     such file exists, url-safe base64 of JSON text;
//   * a std::filesystem::path: a file only;
//   * a JSON object built in code.
// Nothing is read before parse().
class ConfigSource {
 public:
  ConfigSource() = default;
  // NOLINTBEGIN(google-explicit-constructor): any of these is a config.
  ConfigSource(const char* path_or_base64) : text_(path_or_base64) {}
  ConfigSource(std::string path_or_base64) : text_(std::move(path_or_base64)) {}
  ConfigSource(const std::filesystem::path& path) : text_(path.string()), file_only_(true) {}
  ConfigSource(const nlohmann::json& object) : object_(object), is_object_(true) {}
  ConfigSource(const nlohmann::ordered_json& object) : object_(object), is_object_(true) {}
  // NOLINTEND(google-explicit-constructor)

  // Whether no config was given.
  bool empty() const { return text_.empty() && !is_object_; }
  // "ds_config.json", "base64 text" or "JSON object": what messages begin with.
  std::string name() const;

 private:
  friend struct ConfigReader;
  std::string text_;
  nlohmann::ordered_json object_;
  bool file_only_ = false;
  bool is_object_ = false;
};

// An "auto" of the file and what it became.
struct ResolvedAuto {
  std::string path;              // "optimizer.params.lr"
  nlohmann::ordered_json value;  // null: the key is as if it were absent
  std::string source;            // "the program", "default", "computed from hidden_size", "assumed"
};

// Values that the program knows, for keys that the file leaves "auto". Empty: the default.
struct AutoValues {
  std::optional<int64_t> train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps;
  std::optional<double> gradient_clipping;
  std::optional<double> lr;
  std::optional<std::array<double, 2>> betas;
  std::optional<double> eps, weight_decay;
  std::optional<double> warmup_min_lr, warmup_max_lr;
  std::optional<int64_t> warmup_num_steps, total_num_steps;
  std::optional<bool> fp16, bf16;
  std::optional<std::string> nvme_path;  // for offload_param and offload_optimizer: a folder on a local disk
  std::optional<int64_t> hidden_size;    // the width of the model, from which sizes of stage 3 follow
};

// Whether the gradient of a step is the mean over ranks or their sum.
enum class GradientAllreduceOp { kMean, kSum };

// How a step is treated whose gradient is infinite or NaN. kAuto: skipped with fp16 and with bf16.check_grad_overflow,
// applied with bf16 without it, else an error.
enum class NonFiniteGradients { kAuto, kSkip, kError, kContinue };

struct SectionsWithoutEffect;  // opaque; to_json() writes them

// The fields are the keys of a ds_config: configs/README.md explains each.
struct DsConfig {
  // Resolved: train = micro x accumulation x data-parallel size.
  int64_t train_batch_size = 0;
  int64_t train_micro_batch_size_per_gpu = 0;
  int64_t gradient_accumulation_steps = 0;
  bool managed_gradient_accumulation = true;
  bool dataloader_drop_last = false;
  std::optional<int64_t> sequence_parallel_size;
  std::optional<int64_t> data_parallel_size;
  bool use_data_before_expert_parallelism = false;

  OptimizerSection optimizer;
  SchedulerSection scheduler;
  bool zero_allow_untested_optimizer = false;
  bool zero_force_ds_cpu_optimizer = true;

  Fp16Section fp16;
  Bf16Section bf16;
  Fp8Section fp8;  // ours
  TorchAutocastSection torch_autocast;
  DataTypesSection data_types;

  double gradient_clipping = 1.0;       // by global L2 norm; 0 = off
  double gradient_clip_by_value = 0.0;  // ours: every element into [-v, v]; 0 = off
  bool prescale_gradients = false;
  double gradient_predivide_factor = 1.0;
  GradientAllreduceOp gradient_allreduce_op = GradientAllreduceOp::kMean;
  std::optional<DType> communication_data_type;                         // empty: the model's
  GradientCompressionSection gradient_compression;                      // ours
  NonFiniteGradients non_finite_gradients = NonFiniteGradients::kAuto;  // ours
  bool locate_non_finite = false;  // ours: look at every gradient before it is added to others
  // Ours: after every so many steps, compare what ranks should have alike (docs/is_my_run_right.md); 0: never.
  int64_t check_replicas = 1000;
  DType seq_parallel_communication_data_type = DType::kFloat32;
  bool disable_allgather = false;
  comm::Backend communication_backend = comm::Backend::kAuto;  // ours

  ZeroSection zero_optimization;
  ActivationCheckpointingSection activation_checkpointing;
  AioSection aio;

  std::optional<int64_t> steps_per_print;  // empty: never
  bool wall_clock_breakdown = false;       // true, too, when flops_profiler is enabled
  bool memory_breakdown = false;
  bool dump_state = false;
  std::optional<std::string> log_level;
  std::optional<int64_t> vocabulary_size;
  bool disable_python_gc = false;
  TimersSection timers;
  FlightRecorderSection flight_recorder;  // ours
  FlopsProfilerSection flops_profiler;
  CommsLoggerSection comms_logger;
  TensorboardSection tensorboard;
  CsvMonitorSection csv_monitor;
  MetricsSection metrics;  // ours
  TraceSection trace;      // ours

  CheckpointSection checkpoint;
  PipelineSection pipeline;
  TensorParallelSection tensor_parallel;
  SequenceParallelSection sequence_parallel;  // ours
  ExpertParallelSection expert_parallel;
  DataEfficiencySection data_efficiency;
  AutotuningSection autotuning;

  // Removed from DeepSpeed in 0.19.8; the spelling of 0.19.6.
  ProgressiveLayerDropSection progressive_layer_drop;
  CurriculumLearningSection curriculum_learning;
  ElasticitySection elasticity;
  std::optional<SparseAttentionSection> sparse_attention;
  CompressionTrainingSection compression_training;
  bool sparse_gradients = false;

  int64_t seed = 1234;         // ours
  bool deterministic = false;  // ours: same bits on every run
  // Ours: statistics of BatchNorm layers over all data ranks, as convert_sync_batchnorm (dsengine/sync_batch_norm.h).
  bool sync_batchnorm = false;
  // Ours: after each backward() outside of no_sync(), and after train_batch(), buffers become those of data rank 0.
  bool broadcast_buffers = false;
  // Ours: "highest", "high" (TF32 on NVIDIA GPUs) or "medium", for the whole process; empty: the program's setting.
  std::optional<std::string> float32_matmul_precision;
  // Ours: "cudnn", "flash", "efficient", "math": what attention uses on a GPU, in this order; empty: LibTorch's choice.
  std::optional<std::vector<std::string>> sdpa_backends;
  bool strict = false;  // ours: every unknown key is an error

  // Not keys.
  std::string source;                       // the file's name, for messages
  nlohmann::ordered_json text;              // the file's content
  int64_t dp_world_size = 1;                // the number that the batch sizes were resolved for
  std::optional<ElasticBatch> elastic;      // set when elasticity is enabled
  std::vector<ResolvedAuto> resolved_auto;  // in file order
  std::vector<std::string> warnings;        // one line each, for rank 0 to log
  // Sections that are read and checked and change nothing (compile, wandb, nebula, ...); null: none was read.
  std::shared_ptr<const SectionsWithoutEffect> without_effect;

  // The dtype of parameters in forward and backward.
  DType model_dtype() const {
    return fp16.enabled ? DType::kFloat16 : bf16.enabled ? DType::kBFloat16 : DType::kFloat32;
  }
  // The ranks that share a batch: sequence_parallel_size; 1: no sequence is cut.
  int64_t sequence_ranks() const { return std::max<int64_t>(sequence_parallel_size.value_or(1), 1); }
  // The key by which masters are in 16 bits: fp16's or bf16's ..._master_weights_and_grads. Null: they are float32.
  const char* narrow_masters() const {
    if (fp16.enabled && fp16.fp16_master_weights_and_grads) return "fp16.fp16_master_weights_and_grads";
    return bf16.enabled && bf16.bf16_master_weights_and_grads ? "bf16.bf16_master_weights_and_grads" : nullptr;
  }
  bool given(const std::string& key) const { return text.is_object() && text.contains(key); }  // a top-level key
};

// Facts about the job and the program that parse() needs.
struct ParseOptions {
  int64_t dp_world_size = 1;
  // The number of all ranks of the job. If given, dp_world_size is computed from it: divided by pipeline.stages and the
  // ranks of the tensor and the sequence axis.
  std::optional<int64_t> world_size;
  std::optional<int64_t> pipeline_stages;  // stages of the program; the file must agree, and "auto" becomes them
  std::optional<int64_t> tensor_ranks;     // tensor axis of the program's mesh; the file's tensor_parallel must agree
  std::optional<int64_t> sequence_ranks;   // its sequence axis; the file's sequence_parallel_size must agree
  bool strict = false;                     // sets the key of the same name
  AutoValues auto_values;
  // For what is "auto" in the file and not in auto_values, and for a micro-batch where the file has no batch size at
  // all. ResolvedAuto tells each of them as assumed. For tools: what trains asks instead.
  std::optional<AutoValues> assumed_values = std::nullopt;
};

// The defaults of Hugging Face's TrainingArguments: micro-batches of 8, lr 5e-5, no warm-up, clipping
// at 1, float32, ... `total_num_steps`, which the trainer counts from its data, is 1000.
AutoValues hugging_face_values();
// Sets one of the values by its name ("lr") or its path in a ds_config ("optimizer.params.lr"), from text as on a
// command line ("1e-4", "[0.9, 0.95]"). Throws ConfigError for another key or a value of another type.
void set_auto_value(AutoValues& values, const std::string& key, const std::string& text);
// Paths of those of `values` that the file of `config` has no "auto" for: its own number stands. hidden_size is never
// among them.
std::vector<std::string> unused_auto_values(const DsConfig& config, const AutoValues& values);

// Reads, checks and resolves. Throws ConfigError with ALL mistakes of the file: json path, line, value, rule and fix.
// A valid file may still ask for what this build cannot do: engine::initialize says so.
DsConfig parse(const ConfigSource& source, const ParseOptions& options = {});

// Every key with its resolved value, in the order of the structs.
nlohmann::ordered_json to_json(const DsConfig& config);
}  // namespace ds::engine::config
