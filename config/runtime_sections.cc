#include "dsengine/config_runtime.h"

#include <algorithm>

#include "config/comms_operations.h"
#include "config/describe.h"
#include "core/ascii.h"

namespace ds::engine::config {
namespace {

void describe(JsonFields& json, ThroughputTimerSection& s) {
  json.field("enabled", s.enabled);
  json.field("synchronized", s.synchronized);
}

void describe(JsonFields& json, ParallelWriteSection& s) { json.field("pipeline_stage", s.pipeline_stage); }

// One of a few words, in any case.
void word_in_any_case(JsonFields& json, const char* key, std::string& out, const std::vector<std::string>& words) {
  std::string text = out;
  json.field(key, text);
  for (const std::string& word : words) {
    if (equal_in_any_case(word, text)) {
      out = word;
      return;
    }
  }
  std::string known;
  for (const std::string& word : words) known += cat(known.empty() ? "\"" : ", \"", word, "\"");
  json.error(key, cat("expected one of ", known, ", found \"", text, "\""));
}

void describe(JsonFields& json, CheckpointWriterSection& s) {
  word_in_any_case(json, "type", s.type, {"MOCK", "PYTHON", "FAST"});
  json.field("decoupled", s.decoupled);
  json.field("io_buffer_size", s.io_buffer_size, above(0));
  json.field("io_buffer_double", s.io_buffer_double);
  json.field("show_statistics", s.show_statistics);
  json.field("io_multiplier", s.io_multiplier, above(0));
  json.choice("data_parallel", s.data_parallel, {"REPLICA", "SOCKET", "MACHINE", "replica", "socket", "machine"});
}

}  // namespace

void describe(JsonFields& json, ActivationCheckpointingSection& s) {
  json.field("partition_activations", s.partition_activations);
  json.field("cpu_checkpointing", s.cpu_checkpointing);
  json.field("contiguous_memory_optimization", s.contiguous_memory_optimization);
  json.field("number_checkpoints", s.number_checkpoints);
  json.field("synchronize_checkpoint_boundary", s.synchronize_checkpoint_boundary);
  json.field("profile", s.profile);
  json.field("modules", s.modules);
  json.choice("recompute", s.recompute, {"all", "pointwise"});
}

void describe(JsonFields& json, AioSection& s) {
  json.field("block_size", s.block_size, above(0));
  json.field("queue_depth", s.queue_depth, above(0));
  json.field({"intra_op_parallelism", "thread_count"}, s.intra_op_parallelism, above(0));
  json.field("single_submit", s.single_submit);
  json.field("overlap_events", s.overlap_events);
  json.field("use_gds", s.use_gds);
  constexpr int64_t kDiskBlock = 4096;
  if (json.reading() && s.block_size % kDiskBlock != 0) {
    json.error("block_size",
               cat("expected a multiple of ", kDiskBlock, ", the blocks of direct IO, found ", s.block_size));
  }
}

void describe(JsonFields& json, FlopsProfilerSection& s) {
  json.field("enabled", s.enabled);
  json.field("recompute_fwd_factor", s.recompute_fwd_factor);
  json.field("profile_step", s.profile_step);
  if (json.reading() && s.enabled && s.profile_step < 0) {
    json.warning("profile_step", cat("expected the number of steps before the profiled one, found ", s.profile_step,
                                     ": no step is profiled"));
  }
  json.field("module_depth", s.module_depth, at_least(-1));
  json.field("top_modules", s.top_modules, at_least(0));
  json.field("detailed", s.detailed);
  json.field("output_file", s.output_file);
}

void describe(JsonFields& json, CommsLoggerSection& s) {
  json.field("enabled", s.enabled);
  json.field("verbose", s.verbose);
  json.field("prof_all", s.prof_all);
  json.field("prof_ops", s.prof_ops);
  for (const std::string& name : s.prof_ops) {
    if (!json.reading() || find_operation(name)) continue;
    json.error("prof_ops", cat("expected names of operations, ", known_operations(), "; found \"", name, "\""));
  }
  json.field("debug", s.debug);
}

void describe(JsonFields& json, FlightRecorderSection& s) {
  json.field("enabled", s.enabled);
  json.field("entries", s.entries, between(1, 65536));
  json.field("stall_limit", s.stall_limit, at_least(0));
  json.field("folder", s.folder);
  json.field("stacks", s.stacks);
  json.field("end_process", s.end_process);
}

void describe(JsonFields& json, TimersSection& s) {
  json.section("throughput", s.throughput, describe, UnknownKeys::kRefuse);
}

void describe(JsonFields& json, CheckpointSection& s) {
  static const std::vector<std::string> kModes = {"Ignore", "Warn", "Fail"};
  std::string mode = kModes[static_cast<size_t>(s.tag_validation)];
  word_in_any_case(json, "tag_validation", mode, kModes);
  s.tag_validation = static_cast<TagValidation>(std::find(kModes.begin(), kModes.end(), mode) - kModes.begin());
  json.field("load_universal", s.load_universal);
  json.field("use_node_local_storage", s.use_node_local_storage);
  json.section("parallel_write", s.parallel_write, describe, UnknownKeys::kWarn);
  json.field("checkpoint_serialization", s.checkpoint_serialization);
  json.section("writer", s.writer, describe, UnknownKeys::kWarn);
  json.field("keep_last", s.keep_last, at_least(0));
  json.field("durable", s.durable);
}

void describe(JsonFields& json, TensorboardSection& s) {
  json.field("enabled", s.enabled);
  json.field("output_path", s.output_path);
  json.field("job_name", s.job_name);
}

void describe(JsonFields& json, TraceSection& s) {
  json.field("enabled", s.enabled);
  json.field("output_path", s.output_path);
  json.field("wait", s.wait, at_least(0));
  json.field("warmup", s.warmup, at_least(0));
  json.field("active", s.active, at_least(1));
  json.field("repeat", s.repeat, at_least(0));
  json.field("ranks", s.ranks);
  json.field("record_shapes", s.record_shapes);
  json.field("profile_memory", s.profile_memory);
}

void describe(JsonFields& json, MetricsSection& s) {
  json.section("json_lines", s.json_lines, describe, UnknownKeys::kRefuse);
  json.section("openmetrics", s.openmetrics, describe, UnknownKeys::kRefuse);
  json.section("mlflow", s.mlflow, describe, UnknownKeys::kRefuse);
  json.field("tokens_per_sample", s.tokens_per_sample, above(0));
  json.field("mfu", s.mfu);
  json.field("peak_tflops", s.peak_tflops, above(0));
  json.field("flops_per_sample", s.flops_per_sample, above(0));
  json.field("causal_flops_per_sample", s.causal_flops_per_sample, above(0));
}

}  // namespace ds::engine::config
