#include "dsengine/config.h"

#include <algorithm>
#include <cstdlib>

#include "config/auto_values.h"
#include "config/config_source.h"
#include "config/describe.h"
#include "config/elastic_batch.h"
#include "config/parse_steps.h"
#include "config/supported.h"
#include "core/check.h"
#include "core/json/json_fields.h"
#include "core/text.h"
#include "pipeline/schedule/schedule_file.h"

namespace ds::engine::config {
namespace {

std::string ranks_in_words(int64_t ranks) { return cat(ranks, ranks == 1 ? " rank" : " ranks"); }

using nlohmann::ordered_json;

void report_duplicates(const HjsonDocument& document, JsonProblems& problems) {
  for (const DuplicateKey& duplicate : document.duplicates) {
    std::string lines;
    for (const int line : duplicate.lines) lines += cat(lines.empty() ? "" : ", ", line);
    problems.error(duplicate.pointer,
                   cat("is given ", duplicate.lines.size(), " times, in lines ", lines, "; keep one"));
  }
}

GivenBatchSizes read_batch_sizes(JsonFields& json) {
  GivenBatchSizes given;
  json.field("train_batch_size", given.train);
  json.field("train_micro_batch_size_per_gpu", given.micro);
  json.field("gradient_accumulation_steps", given.accumulation);
  return given;
}

bool wrong_type_of_batch_size(const JsonProblems& problems) {
  return std::any_of(problems.errors().begin(), problems.errors().end(), [](const std::string& line) {
    return line.starts_with("train_batch_size") || line.starts_with("train_micro_batch_size_per_gpu") ||
           line.starts_with("gradient_accumulation_steps");
  });
}

// A key of a section written at the top level: says where it belongs.
void report_misplaced(const DsConfig& config, const JsonReading& reading, JsonFields& json) {
  static const std::vector<std::string> kKnown = known_keys();
  const auto is_known = [](const std::string& path) { return std::binary_search(kKnown.begin(), kKnown.end(), path); };
  for (const auto& entry : config.text.items()) {
    const std::string& key = entry.key();
    const std::vector<std::string>& declared = json.keys().declared();
    if (is_known(key) || std::find(declared.begin(), declared.end(), key) != declared.end()) continue;
    for (const char* section : {"zero_optimization", "fp16", "bf16", "optimizer.params", "scheduler.params"}) {
      if (!is_known(cat(section, ".", key))) continue;
      const std::string message = cat("has no effect here; it belongs into \"", section, "\"");
      reading.strict ? json.error(key, message) : json.warning(key, message);
      json.keys().declare(key);
      break;
    }
  }
}

// An "auto" batch size that nobody gave follows from the other two.
void tell_derived_batch_sizes(DsConfig& config) {
  for (ResolvedAuto& entry : config.resolved_auto) {
    const int64_t* size = entry.path == "train_batch_size"                 ? &config.train_batch_size
                          : entry.path == "train_micro_batch_size_per_gpu" ? &config.train_micro_batch_size_per_gpu
                          : entry.path == "gradient_accumulation_steps"    ? &config.gradient_accumulation_steps
                                                                           : nullptr;
    if (size == nullptr || !(entry.value.is_null() || config.elastic)) continue;
    entry.value = *size;
    entry.source = config.elastic ? "elasticity" : "the other batch sizes";
  }
}

// A file that leaves all batch sizes to its program.
void assume_micro_batch(DsConfig& config, const ParseOptions& options, GivenBatchSizes& given) {
  if (given.train || given.micro || !options.assumed_values) return;
  given.micro = options.assumed_values->train_micro_batch_size_per_gpu;
  if (!given.micro) return;
  const std::string path = "train_micro_batch_size_per_gpu";
  std::erase_if(config.resolved_auto, [&path](const ResolvedAuto& entry) { return entry.path == path; });
  config.resolved_auto.push_back({path, *given.micro, kAssumed});
}

// Ranks of the tensor axis, which two keys and the program's mesh may say.
int64_t choose_tensor_ranks(DsConfig& config, const ParseOptions& options, JsonProblems& problems) {
  constexpr const char* kSize = "/tensor_parallel/autotp_size";
  const int64_t own = std::max<int64_t>(config.tensor_parallel.autotp_size, 1);
  const int64_t other = std::max<int64_t>(config.tensor_parallel.tensor_parallel.tp_size, 1);
  if (own > 1 && other > 1 && own != other) {
    problems.error(kSize, cat("expected tensor_parallel.tensor_parallel.tp_size, ", other, ", found ", own,
                              "; both are the ranks of the tensor axis, keep one of them"));
  }
  int64_t ranks = std::max(own, other);
  if (options.tensor_ranks && ranks > 1 && ranks != *options.tensor_ranks) {
    problems.error(
        kSize, cat("expected ", *options.tensor_ranks, ", which the axis tensor of the program's mesh says, ", "found ",
                   ranks, "; remove one of them"));
  }
  ranks = options.tensor_ranks.value_or(ranks);
  if (ranks > 1) config.tensor_parallel.autotp_size = ranks;
  return ranks;
}

// Ranks of the sequence axis, which a key and the program's mesh may say.
int64_t choose_sequence_ranks(DsConfig& config, const ParseOptions& options, JsonProblems& problems) {
  const int64_t own = config.sequence_ranks();
  if (!options.sequence_ranks) return own;
  if (config.sequence_parallel_size && own != *options.sequence_ranks) {
    problems.error("/sequence_parallel_size",
                   cat("expected ", *options.sequence_ranks,
                       ", which the axis sequence of the program's mesh says, found ", own, "; remove one of them"));
  }
  if (*options.sequence_ranks > 1) config.sequence_parallel_size = options.sequence_ranks;
  return *options.sequence_ranks;
}

// Chooses the number of data-parallel ranks: what a pipeline, a tensor axis and a sequence axis leave.
void choose_data_parallel_size(DsConfig& config, const ParseOptions& options, JsonProblems& problems) {
  constexpr const char* kStages = "/pipeline/stages";
  const std::optional<int64_t> given = config.pipeline.stages;
  if (options.pipeline_stages && given && *given != *options.pipeline_stages) {
    problems.error(kStages, cat("expected ", *options.pipeline_stages, ", which the program's PipelineOptions.stages ",
                                "says, found ", *given, "; remove one of them"));
  }
  const int64_t stages = options.pipeline_stages.value_or(given.value_or(1));
  if (options.pipeline_stages) config.pipeline.stages = stages;
  const int64_t tensor = choose_tensor_ranks(config, options, problems);
  const int64_t sequence = choose_sequence_ranks(config, options, problems);
  if (!options.world_size || stages < 1) return;
  const int64_t left = *options.world_size / stages / tensor;
  const std::string multiple = cat(fixed(static_cast<double>(stages) * static_cast<double>(tensor), 0), " ranks",
                                   stages > 1 && tensor > 1 ? " (pipeline.stages x tensor_parallel.autotp_size)" : "");
  if (*options.world_size % stages != 0) {
    problems.error(kStages, cat("expected a divisor of the ", ranks_in_words(*options.world_size), ", found ", stages,
                                "; start a multiple of ", multiple, ", or change the stages"));
  } else if (*options.world_size / stages % tensor != 0) {
    problems.error(
        "/tensor_parallel/autotp_size",
        cat("expected a divisor of the ", ranks_in_words(*options.world_size / stages), stages > 1 ? " of a stage" : "",
            ", found ", tensor, "; start a multiple of ", multiple, ", or change it"));
  } else if (left % sequence != 0) {
    problems.error("/sequence_parallel_size",
                   cat("expected a divisor of the ", ranks_in_words(left), " beside the other axes, found ", sequence,
                       "; start a multiple of ", sequence * tensor * stages, " ranks, or change it"));
  }
  config.dp_world_size = std::max<int64_t>(1, left / sequence);
}

void read_into(DsConfig& config, const JsonReading& reading, const ParseOptions& options) {
  JsonFields json(reading, "", config.text, true);
  GivenBatchSizes given = read_batch_sizes(json);
  const auto left_auto = [&config](const char* key, bool resolved) {
    return config.text.contains(key) && config.text[key] == "auto" && !resolved;
  };
  given.left_auto = left_auto("train_batch_size", given.train.has_value()) ||
                    left_auto("train_micro_batch_size_per_gpu", given.micro.has_value());
  const bool readable = !wrong_type_of_batch_size(reading.problems);
  describe_top_level(json, config);
  report_misplaced(config, reading, json);
  json.finish(UnknownKeys::kWarn);
  try {
    read_own_schedule(config.pipeline);
  } catch (const Error& error) {  // the file is not there, or is no schedule
    reading.problems.error("/pipeline/schedule", error.what());
  }
  choose_data_parallel_size(config, options, reading.problems);
  if (config.elasticity.enabled) {
    resolve_elastic_batch(config, std::getenv("DEEPSPEED_ELASTICITY_CONFIG"), reading.problems);
    tell_derived_batch_sizes(config);
  } else if (readable) {
    assume_micro_batch(config, options, given);
    given.sequence_ranks = config.sequence_ranks();
    const BatchSizes sizes = resolve_batch_sizes(given, config.dp_world_size, reading.problems);
    config.train_batch_size = sizes.train;
    config.train_micro_batch_size_per_gpu = sizes.micro;
    config.gradient_accumulation_steps = sizes.accumulation;
    tell_derived_batch_sizes(config);
  }
  config.wall_clock_breakdown = config.wall_clock_breakdown || config.flops_profiler.enabled;
}

bool asks_for_strict(const ordered_json& root) {
  bool strict = false;
  return root.contains("strict") && convert(root["strict"], strict) && strict;
}

}  // namespace

DsConfig parse(const ConfigSource& source, const ParseOptions& options) {
  require<UsageError>(options.dp_world_size > 0, "parse: expected dp_world_size > 0, found ", options.dp_world_size);
  const HjsonDocument document = ConfigReader::read(source);
  const std::string name = source.name();
  require<ConfigError>(document.root.is_object(), name, ": expected an object {...}, found ",
                       lazy([&] { return shown(document.root); }));

  DsConfig config;
  config.source = name;
  config.text = document.root;
  config.dp_world_size = options.dp_world_size;
  JsonProblems problems(document);
  const JsonReading reading{
      .document = document,
      .problems = problems,
      .strict = options.strict || asks_for_strict(document.root),
      .auto_value = [&](const std::string& pointer) { return resolve_auto(pointer, options, document.root); },
      .meaning = meaning_of_key,
      .on_auto =
          [&](const std::string& pointer, const ordered_json& value, const std::string& from) {
            config.resolved_auto.push_back({dotted_path(pointer), value, from});
          }};
  report_duplicates(document, problems);
  read_into(config, reading, options);
  check_across_sections(config, problems);
  problems.throw_errors(name);
  config.strict = reading.strict;
  config.warnings = problems.warnings();
  return config;
}

ordered_json to_json(const DsConfig& config) {
  ordered_json out;
  JsonFields json(out);
  DsConfig copy = config;
  json.field("train_batch_size", copy.train_batch_size);
  json.field("train_micro_batch_size_per_gpu", copy.train_micro_batch_size_per_gpu);
  json.field("gradient_accumulation_steps", copy.gradient_accumulation_steps);
  describe_top_level(json, copy);
  return out;
}

void read_own_schedule(PipelineSection& section) {
  section.own_schedule = pipeline::is_schedule_file(section.schedule)
                             ? std::make_shared<const pipeline::Schedule>(pipeline::read_schedule(section.schedule))
                             : nullptr;
}

}  // namespace ds::engine::config
