// Sections of a ds_config about the run: activation memory, IO, profiling, timers, checkpoints, monitors, elasticity
// and autotuning. Field names and defaults are the keys and defaults of ds_config; configs/README.md explains each.
//
// Plain values that the ds_config owns; safe from any thread; nothing throws. Torch-free.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace ds::engine::config {

// activation_checkpointing
struct ActivationCheckpointingSection {
  bool partition_activations = false;
  bool cpu_checkpointing = false;
  bool contiguous_memory_optimization = false;
  std::optional<int64_t> number_checkpoints;
  bool synchronize_checkpoint_boundary = false;
  bool profile = false;
  // Own key. Modules whose activations are computed again without a call in forward: regular expressions (ECMAScript)
  // that match whole names, as named_modules() gives them. Empty: none.
  std::vector<std::string> modules;
  std::string recompute = "all";  // own key, for these modules: "all", or "pointwise", which keeps outputs of products
};

// aio
struct AioSection {
  int64_t block_size = 1 << 20;  // bytes
  int64_t queue_depth = 8;
  int64_t intra_op_parallelism = 1;
  bool single_submit = false;
  bool overlap_events = true;
  bool use_gds = false;  // parameters in files are read straight into a GPU's memory
};

// flops_profiler; see docs/flops_profiler.md
struct FlopsProfilerSection {
  bool enabled = false;
  double recompute_fwd_factor = 0.0;
  int64_t profile_step = 1;   // the step after so many
  int64_t module_depth = -1;  // -1: the deepest
  int64_t top_modules = 1;
  bool detailed = true;
  std::optional<std::string> output_file;  // empty: the log
};

// comms_logger
struct CommsLoggerSection {
  bool enabled = false;
  bool verbose = false;
  bool prof_all = true;
  std::vector<std::string> prof_ops;
  bool debug = false;
};

// timers.throughput
struct ThroughputTimerSection {
  bool enabled = true;
  bool synchronized = true;
};

// flight_recorder, a section of ours (docs/failures.md)
struct FlightRecorderSection {
  bool enabled = true;
  int64_t entries = 512;    // collectives that each rank remembers
  double stall_limit = 60;  // seconds of waiting in one collective until a report; 0: none
  std::string folder;       // empty: $DS_FLIGHT_FOLDER, else dsengine-UID in the temporary folder
  bool stacks = true;       // a real-time signal is taken, to name the function that a late rank is in
  bool end_process = true;  // a rank that hangs after ranks were told to end is ended; false: it is left as it is
};

// timers
struct TimersSection {
  ThroughputTimerSection throughput;
};

// How a tag of save_checkpoint() is treated that differs between ranks.
enum class TagValidation { kIgnore, kWarn, kFail };

// checkpoint.parallel_write
struct ParallelWriteSection {
  bool pipeline_stage = false;
};

// checkpoint.writer
struct CheckpointWriterSection {
  std::string type = "FAST";  // MOCK, PYTHON, FAST
  bool decoupled = false;
  int64_t io_buffer_size = int64_t{64} << 20;  // bytes
  bool io_buffer_double = true;
  bool show_statistics = false;
  int64_t io_multiplier = 1;
  std::optional<std::string> data_parallel;  // REPLICA, SOCKET, MACHINE
};

// checkpoint
struct CheckpointSection {
  TagValidation tag_validation = TagValidation::kWarn;
  bool load_universal = false;
  bool use_node_local_storage = false;
  ParallelWriteSection parallel_write;
  bool checkpoint_serialization = true;
  std::optional<CheckpointWriterSection> writer;
  int64_t keep_last = 0;  // own key: SaveOptions::keep_last of saves that change `latest`, 0 = all stay
  bool durable = true;    // own key: on the disk before they are published
};

// tensorboard and csv_monitor. Events go to output_path/job_name.
struct TensorboardSection {
  bool enabled = false;
  std::string output_path;
  std::string job_name = "DeepSpeedJobName";
};

using CsvMonitorSection = TensorboardSection;

// metrics, a section of ours (docs/monitoring.md)
struct MetricsSection {
  TensorboardSection json_lines;            // a file of JSON lines
  TensorboardSection openmetrics;           // a text file for node_exporter, output_path/job_name.prom
  TensorboardSection mlflow;                // a run in MLflow's file store at output_path, in the experiment job_name
  std::optional<double> tokens_per_sample;  // for tokens a second; empty: the counts of backward_mean()
  bool mfu = false;                         // write the share of the device's peak that the model's operations use
  // The peak of one device in 10^12 operations a second; empty: initialize() times products of matrices.
  std::optional<double> peak_tflops;
  // Operations of the whole model for a sample, forward and backward, with all pairs of attention, and with those that
  // a causal mask leaves; empty: flops_profiler, which is enabled then, counts them.
  std::optional<double> flops_per_sample;
  std::optional<double> causal_flops_per_sample;
};

// trace, a section of ours (docs/trace.md)
struct TraceSection {
  bool enabled = false;
  std::string output_path;      // the folder of rank_R_step_N.json
  int64_t wait = 1;             // steps that are not looked at
  int64_t warmup = 1;           // steps in which the profiler is made ready
  int64_t active = 3;           // steps that are recorded into one file
  int64_t repeat = 1;           // files of a rank; 0: until the run ends
  std::vector<int64_t> ranks;   // ranks that record; empty: all
  bool record_shapes = false;   // sizes and types of inputs
  bool profile_memory = false;  // events of memory that is taken and given back
};

// elasticity
struct ElasticitySection {
  bool enabled = false;
  std::optional<int64_t> max_train_batch_size;
  std::optional<std::vector<int64_t>> micro_batch_sizes;
  int64_t min_gpus = 1;
  int64_t max_gpus = 10000;
  int64_t num_gpus_per_node = 1;
  int64_t model_parallel_size = 1;
  int64_t min_time = 0;
  bool prefer_larger_batch = true;
  bool ignore_non_elastic_batch_info = false;
  double version = 0.2;
};

// The batch sizes that follow from elasticity. Sizes count data-parallel ranks.
struct ElasticBatch {
  int64_t train = 0;           // global batch, the same for all valid sizes
  std::vector<int64_t> valid;  // sizes, ascending; may be empty
  int64_t micro = 0;           // micro-batch at the number of ranks asked for
  int64_t accumulation = 0;    // accumulation steps at the number of ranks asked for
  // The global batch of the sizes in `valid`. It is not `train` when the size asked for is not among them (version
  // 0.2).
  int64_t train_of_valid = 0;
};

// autotuning.model_info
struct ModelInfoSection {
  bool profile = false;
  std::optional<int64_t> num_params;
  std::optional<int64_t> hidden_size;
  std::optional<int64_t> num_layers;
};

// autotuning
struct AutotuningSection {
  bool enabled = false;
  bool fast = true;
  std::string results_dir = "autotuning_results";
  std::string exps_dir = "autotuning_exps";
  bool overwrite = true;
  int64_t start_profile_step = 3;
  int64_t end_profile_step = 5;
  std::string metric = "throughput";
  std::optional<std::string> metric_path;
  std::string tuner_type = "gridsearch";
  int64_t tuner_early_stopping = 5;
  int64_t tuner_num_trials = 50;
  nlohmann::ordered_json arg_mappings;  // null or an object, as written
  std::optional<int64_t> max_train_batch_size;
  int64_t min_train_batch_size = 1;
  int64_t max_train_micro_batch_size_per_gpu = 1024;
  int64_t min_train_micro_batch_size_per_gpu = 1;
  int64_t num_tuning_micro_batch_sizes = 3;
  int64_t mp_size = 1;
  std::optional<std::string> model_info_path;
  ModelInfoSection model_info;
};

}  // namespace ds::engine::config
