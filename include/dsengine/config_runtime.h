// Memory, IO, profiling, timers and checkpoint sections. Field names and defaults are the keys and defaults of
// ds_config.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ds::engine::config {

struct ActivationCheckpointingSection {
  bool partition_activations = false;
  bool cpu_checkpointing = false;
  bool contiguous_memory_optimization = false;
  std::optional<int64_t> number_checkpoints;
  bool synchronize_checkpoint_boundary = false;
  bool profile = false;
};

struct AioSection {
  int64_t block_size = 1 << 20;  // bytes
  int64_t queue_depth = 8;
  int64_t intra_op_parallelism = 1;
  bool single_submit = false;
  bool overlap_events = true;
  bool use_gds = false;
};

struct FlopsProfilerSection {
  bool enabled = false;
  double recompute_fwd_factor = 0.0;
  int64_t profile_step = 1;
  int64_t module_depth = -1;  // -1: the deepest
  int64_t top_modules = 1;
  bool detailed = true;
  std::optional<std::string> output_file;  // empty: standard output
};

struct CommsLoggerSection {
  bool enabled = false;
  bool verbose = false;
  bool prof_all = true;
  std::vector<std::string> prof_ops;
  bool debug = false;
};

struct ThroughputTimerSection {
  bool enabled = true;
  bool synchronized = true;
};

// Ours: comm/flight/flight_watch.h.
struct FlightRecorderSection {
  bool enabled = true;
  int64_t entries = 512;    // collectives that each rank remembers
  double stall_limit = 60;  // seconds of waiting in one collective until a report; 0: none
  std::string folder;       // empty: $DS_FLIGHT_FOLDER, else dsengine-UID in the temporary folder
};

struct TimersSection {
  ThroughputTimerSection throughput;
};

enum class TagValidation { kIgnore, kWarn, kFail };

struct ParallelWriteSection {
  bool pipeline_stage = false;
};

struct CheckpointWriterSection {
  std::string type = "FAST";  // MOCK, PYTHON, FAST
  bool decoupled = false;
  int64_t io_buffer_size = int64_t{64} << 20;  // bytes
  bool io_buffer_double = true;
  bool show_statistics = false;
  int64_t io_multiplier = 1;
  std::optional<std::string> data_parallel;  // REPLICA, SOCKET, MACHINE
};

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

}  // namespace ds::engine::config
