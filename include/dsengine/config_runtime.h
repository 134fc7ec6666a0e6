// Sections of a ds_config about the run: activation memory, IO, profiling, timers, checkpoints, monitors and
// data_efficiency. Field names and defaults are the keys and defaults of ds_config; configs/README.md explains each.
//
// Plain values that the ds_config owns; safe from any thread; nothing throws. Torch-free.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "dsengine/difficulty_schedule.h"

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
  // of whole names, as named_modules() gives them. Empty: none.
  std::vector<std::string> modules;
  std::string recompute = "all";  // own key. Of these modules: "all", or "pointwise", which keeps outputs of products
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

// What becomes of a tag of save_checkpoint() that differs between ranks.
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
  int64_t keep_last = 0;  // own key: whole checkpoints that stay in the folder, 0 = all
  bool durable = true;    // own key: on the disk before they are published
};

// tensorboard and csv_monitor. Events go to output_path/job_name.
struct TensorboardSection {
  bool enabled = false;
  std::string output_path;
  std::string job_name = "DeepSpeedJobName";
};

using CsvMonitorSection = TensorboardSection;

// Python SDKs: read, checked and warned about, never used.
struct WandbSection {
  bool enabled = false;
  std::optional<std::string> group;
  std::optional<std::string> team;
  std::string project = "deepspeed";
};

// comet
struct CometSection {
  bool enabled = false;
  int64_t samples_log_interval = 100;
  std::optional<std::string> project;
  std::optional<std::string> workspace;
  std::optional<std::string> api_key;
  std::optional<std::string> experiment_name;
  std::optional<std::string> experiment_key;
  std::optional<bool> online;
  std::optional<std::string> mode;
};

// data_efficiency.data_sampling.curriculum_learning
struct CurriculumSection {
  bool enabled = false;
  std::optional<std::string> data_cluster_path;
  nlohmann::ordered_json curriculum_metrics;      // {name: {...}}, as written
  std::vector<efficiency::SampleMetric> metrics;  // that these are, where it is enabled
};

// data_efficiency.data_sampling.dynamic_batching
struct DynamicBatchingSection {
  bool enabled = false;
  std::optional<std::string> metrics_path;
  std::string lr_scaling_method = "linear";
  int64_t min_batch_size = 1;
  std::optional<int64_t> max_batch_size;
  std::string sequence_picking_order = "dataloader";
  std::optional<int64_t> max_tokens;
  bool verbose = false;
};

// data_efficiency.data_sampling
struct DataSamplingSection {
  bool enabled = false;
  int64_t num_epochs = 1000;
  int64_t num_workers = 0;
  bool pin_memory = false;
  CurriculumSection curriculum_learning;
  DynamicBatchingSection dynamic_batching;
};

// data_efficiency.data_routing.random_ltd.layer_token_lr_schedule
struct LayerTokenLrScheduleSection {
  bool enabled = false;
};

// data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config
struct KeptTokensStepsSection {
  std::optional<int64_t> require_steps;
  std::optional<int64_t> seq_per_step;
};

// data_efficiency.data_routing.random_ltd.random_ltd_schedule
struct KeptTokensSection {
  std::optional<int64_t> min_value;
  std::optional<int64_t> max_value;
  std::string schedule_type = "fixed_linear";
  KeptTokensStepsSection schedule_config;
};

// data_efficiency.data_routing.random_ltd
struct RandomLtdSection {
  bool enabled = false;
  int64_t total_layer_num = 0;
  int64_t random_ltd_layer_num = 0;
  std::vector<int64_t> random_ltd_layer_id;
  std::optional<std::string> model_mask_name;
  std::string model_type = "decoder";
  std::string hidden_state_order = "batch_seq_dim";
  KeptTokensSection random_ltd_schedule;
  efficiency::DifficultySchedule kept;  // that these keys give, where it is enabled
  LayerTokenLrScheduleSection layer_token_lr_schedule;
};

// data_efficiency.data_routing
struct DataRoutingSection {
  bool enabled = false;
  RandomLtdSection random_ltd;
};

// data_efficiency
struct DataEfficiencySection {
  bool enabled = false;
  int64_t seed = 1234;
  DataSamplingSection data_sampling;
  DataRoutingSection data_routing;

  // Whether a curriculum chooses samples, with the sections around it.
  bool chooses_samples() const { return enabled && data_sampling.enabled && data_sampling.curriculum_learning.enabled; }
  // Whether random-LTD is on, with the sections around it.
  bool drops_tokens() const { return enabled && data_routing.enabled && data_routing.random_ltd.enabled; }
};

}  // namespace ds::engine::config
