#include "tools/check_command.h"

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "config/auto_values.h"
#include "config/plan/device_overhead.h"
#include "config/plan/plan.h"
#include "core/check.h"
#include "core/json/json_convert.h"
#include "core/shown_text.h"
#include "core/text.h"
#include "dsengine/config.h"
#include "launcher/command_line/number_flags.h"
#include "tools/commands.h"
#include "tools/flag_limits.h"
#include "tools/key_reference.h"
#include "tools/machine.h"
#include "tools/split_parameters.h"
#include "zero/memory_model.h"

namespace ds::tool {
namespace {

using engine::Plan;
using engine::config::DsConfig;
using nlohmann::ordered_json;

constexpr int kFine = 0;
constexpr int kRefused = 2;

struct Report {
  DsConfig config;
  Plan plan;
  std::vector<ExplainedKey> explained;  // with --explain
  std::optional<int64_t> parameters;    // of a rank; where ranks of a pipeline differ, of the mean one
  std::optional<SplitReport> splits;    // of --split_parameters
  // Along the tensor axis, per rank: bytes for a token of a micro-batch, and in a step.
  std::optional<double> tensor_sent_per_token;
  std::optional<double> tensor_sent;
  // Per rank and step, when the plan knows its bytes. With gradient_compression it depends on the model's shapes.
  std::optional<int64_t> sent_bytes;
};

engine::config::AutoValues given_values(const std::vector<std::string>& assignments) {
  engine::config::AutoValues values;
  for (const std::string& assignment : assignments) {
    const size_t sign = assignment.find('=');
    require<ConfigError>(sign != std::string::npos, "--auto ", assignment, ": expected KEY=VALUE, as --auto lr=1e-4");
    try {
      engine::config::set_auto_value(values, assignment.substr(0, sign), assignment.substr(sign + 1));
    } catch (const ConfigError& error) {
      throw ConfigError(cat("--auto ", error.what()));
    }
  }
  return values;
}

void require_used(const DsConfig& config, const engine::config::AutoValues& values) {
  const std::vector<std::string> unused = engine::config::unused_auto_values(config, values);
  require<ConfigError>(unused.empty(), "--auto ", lazy([&] { return unused.front(); }), ": expected \"auto\" there in ",
                       config.source, ", found a value of its own, or no such key; remove the flag, or write \"auto\"");
}

// Elements of a rank: of its stage, and of cut parameters its parts.
void count_parameters(const CheckOptions& options, Report& report) {
  const int64_t stages = report.config.pipeline.stages.value_or(1);
  const int64_t tensor = report.config.tensor_parallel.size();
  const auto share = [](int64_t elements, int64_t ranks) { return (elements + ranks - 1) / ranks; };
  require<ConfigError>(options.split_parameters.empty() || !options.parameters,
                       "ds-tool check: expected one of --parameters and --split_parameters, found both; the file says ",
                       "how many parameters there are");
  if (options.parameters) report.parameters = share(share(*options.parameters, stages), tensor);
  if (options.split_parameters.empty()) return;
  report.splits = report_splits(report.config.tensor_parallel, read_parameter_shapes(options.split_parameters));
  report.parameters = share(report.splits->rank_elements, stages);
}

void count_tensor_traffic(const CheckOptions& options, Report& report) {
  if (!report.splits || report.plan.topology.tensor == 1) return;
  const auto stages = static_cast<double>(report.plan.topology.pipe);
  const auto element = static_cast<double>(bytes_of(report.plan.autocast.value_or(report.plan.model_dtype)));
  const double per_token =
      (report.splits->sent_elements_per_token * element + report.splits->sent_loss_bytes_per_token) / stages;
  report.tensor_sent_per_token = per_token;
  if (!options.tokens) return;
  report.tensor_sent =
      per_token * static_cast<double>(*options.tokens) * static_cast<double>(report.config.gradient_accumulation_steps);
}

// Returns the hosts, where the options tell them.
std::optional<Machine> machine_of(const CheckOptions& options) {
  if (!options.ranks_per_node) return std::nullopt;
  return Machine{.ranks = options.world_size, .ranks_per_node = *options.ranks_per_node};
}

// Returns what the options tell of the model and of the hosts.
engine::PlanFacts facts_of(const CheckOptions& options, const Report& report) {
  const int64_t stages = report.config.pipeline.stages.value_or(1);
  engine::PlanFacts facts{
      .parameters = report.parameters, .activation_bytes = options.activation_bytes, .pipeline_module = stages > 1};
  if (report.splits) facts.split_parameters = (report.splits->part_elements + stages - 1) / stages;
  const std::optional<Machine> machine = machine_of(options);
  if (!machine) return facts;
  facts.tensor_leaves_host = crossing_text(*machine, report.config.tensor_parallel.size());
  facts.tensor_inside_host = facts.tensor_leaves_host.empty();
  facts.pipe_inside_host = pipelines_inside_nodes(*machine, stages);
  return facts;
}

Report examine(const CheckOptions& options) {
  Report report;
  const engine::config::AutoValues given = given_values(options.auto_values);
  report.config = engine::config::parse(options.config, {.world_size = options.world_size,
                                                         .strict = options.strict,
                                                         .auto_values = given,
                                                         .assumed_values = engine::config::hugging_face_values()});
  require_used(report.config, given);
  if (options.explain) report.explained = explain_keys(report.config.text, KeyReference(key_reference_text()));
  count_parameters(options, report);
  engine::Topology topology{.world_size = options.world_size,
                            .dp = report.config.dp_world_size * report.config.sequence_ranks(),
                            .pipe = report.config.pipeline.stages.value_or(1),
                            .tensor = report.config.tensor_parallel.size(),
                            .sequence = report.config.sequence_ranks()};
  if (const auto machine = machine_of(options)) {
    topology.ranks_per_host = data_ranks_per_node(*machine, topology.dp, topology.tensor);
  }
  report.plan = engine::make_plan(report.config, topology, facts_of(options, report));
  count_tensor_traffic(options, report);
  if (report.parameters && !report.plan.compression.compresses() && !report.plan.error_feedback) {
    report.sent_bytes =
        zero::predict_sent_bytes(engine::memory_question(report.config, report.plan, *report.parameters));
  }
  return report;
}

ordered_json number_or_null(const std::optional<double>& number) {
  return number ? ordered_json(*number) : ordered_json();
}

ordered_json bytes_to_json(const Report& report) {
  if (!report.plan.bytes) return nullptr;
  const zero::ModelStateBytes& bytes = *report.plan.bytes;
  const engine::DeviceOverhead overhead = engine::predict_device_overhead(report.plan);
  return {{"elements", *report.parameters},
          {"parameters", bytes.parameters},
          {"gradients", bytes.gradients},
          {"master", bytes.master},
          {"optimizer", bytes.optimizer},
          {"buffers", bytes.buffers},
          {"total", bytes.total()},
          {"host", report.plan.offloaded_bytes.host_total()},
          {"files", report.plan.offloaded_bytes.file},
          {"gathered_in_step", report.plan.step_bytes.gathered},
          {"secondary_in_step", report.plan.step_bytes.secondary},
          {"activations_in_step", report.plan.activation_bytes},
          {"gradient_compression", report.plan.compression_bytes},
          {"beside_on_a_gpu",
           {{"context", overhead.context}, {"nccl", overhead.nccl}, {"workspaces", overhead.workspaces}}},
          {"sent_per_step", report.sent_bytes ? ordered_json(*report.sent_bytes) : ordered_json()},
          {"tensor_sent_per_token", number_or_null(report.tensor_sent_per_token)},
          {"tensor_sent_per_step", number_or_null(report.tensor_sent)}};
}

// The number of ranks that share one copy of the model.
int64_t model_ranks(const Report& report) { return report.plan.topology.pipe * report.plan.topology.tensor; }

// World sizes that share a global batch; null without elasticity.
ordered_json elastic_to_json(const Report& report) {
  if (!report.config.elastic) return nullptr;
  ordered_json sizes = ordered_json::array();
  for (const int64_t size : report.config.elastic->valid) sizes.push_back(size * model_ranks(report));
  return {{"train_batch_size", report.config.elastic->train_of_valid}, {"valid_world_sizes", sizes}};
}

std::string elastic_in_words(const Report& report) {
  const std::vector<int64_t>& valid = report.config.elastic->valid;
  const int64_t ranks = model_ranks(report);
  std::string text = cat("a batch of ", report.config.elastic->train_of_valid, " on ");
  for (size_t i = 0; i < valid.size(); ++i) text += cat(i > 0 ? ", " : "", valid[i] * ranks);
  return text + " ranks";
}

// Returns the warnings of the config, and of the plan.
std::vector<std::string> warnings_of(const Report& report) {
  std::vector<std::string> warnings = report.config.warnings;
  warnings.insert(warnings.end(), report.plan.warnings.begin(), report.plan.warnings.end());
  return warnings;
}

ordered_json to_json(const Report& report) {
  ordered_json plan = ordered_json::array();
  for (const engine::PlanRow& row : report.plan.rows) {
    plan.push_back({{"what", row.what}, {"choice", row.choice}, {"reason", row.reason}});
  }
  ordered_json chosen = ordered_json::array();
  for (const engine::config::ResolvedAuto& entry : report.config.resolved_auto) {
    chosen.push_back({{"path", entry.path}, {"value", entry.value}, {"source", entry.source}});
  }
  ordered_json explained = ordered_json::object();
  for (const ExplainedKey& key : report.explained) explained[key.path] = key.text;
  return {{"ok", true},
          {"source", report.config.source},
          {"world_size", report.plan.topology.world_size},
          {"config", engine::config::to_json(report.config)},
          {"auto", chosen},
          {"explained", explained},
          {"warnings", warnings_of(report)},
          {"plan", plan},
          {"split", report.splits ? to_json(*report.splits) : ordered_json()},
          {"elasticity", elastic_to_json(report)},
          {"bytes_per_rank", bytes_to_json(report)}};
}

using Columns = std::vector<std::pair<std::string, std::string>>;

void print_columns(const Columns& rows, std::ostream& out) {
  size_t width = 0;
  for (const auto& [name, value] : rows) width = std::max(width, name.size());
  for (const auto& [name, value] : rows) {
    out << "  " << name << std::string(width - name.size() + 2, ' ') << value << '\n';
  }
}

// Whole, but for what would fill the screen.
std::string shown_value(const ordered_json& value) {
  constexpr size_t kLongest = 500;
  return shown_text(value.dump(-1, ' ', false, ordered_json::error_handler_t::replace), kLongest);
}

// Appends the keys that the file has, with the values they resolve to.
void append_given(const std::string& prefix, const ordered_json& written, const ordered_json& resolved, Columns& rows) {
  for (const auto& [key, value] : written.items()) {
    if (!resolved.contains(key)) continue;
    if (value.is_object() && resolved[key].is_object()) {
      append_given(cat(prefix, key, "."), value, resolved[key], rows);
    } else {
      rows.emplace_back(shown_text(cat(prefix, key)), shown_value(resolved[key]));
    }
  }
}

Columns resolved_values(const DsConfig& config) {
  const ordered_json resolved = engine::config::to_json(config);
  Columns rows;
  for (const char* key : {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}) {
    rows.emplace_back(key, cat(resolved[key].dump(), config.given(key) ? "" : " (derived)"));
  }
  ordered_json rest = config.text;
  for (const auto& [key, value] : rows) rest.erase(key);
  append_given("", rest, resolved, rows);
  return rows;
}

// Says for how many elements the bytes per rank are.
std::string elements_text(const Report& report) {
  const int64_t stages = report.plan.topology.pipe;
  const int64_t tensor = report.plan.topology.tensor;
  if (stages == 1 && (tensor == 1 || report.splits))
    return tensor == 1 ? "" : cat(", for ", *report.parameters, " elements");
  std::string text = cat(", for ", *report.parameters, " elements, 1/", report.splits ? stages : stages * tensor,
                         report.splits && tensor > 1 ? " of those above" : " of the model");
  if (tensor > 1 && !report.splits) text += ", if all of it is split (what stays whole: --split_parameters)";
  if (stages > 1) text += " (stages differ: ds-tool simulate --per_rank)";
  return text;
}

void print_bytes(const Report& report, std::ostream& out) {
  const zero::ModelStateBytes& bytes = *report.plan.bytes;
  const int64_t stages = report.plan.topology.pipe;
  const engine::DeviceOverhead overhead = engine::predict_device_overhead(report.plan);
  out << "\nBytes per rank" << elements_text(report) << '\n';
  Columns rows = {{"parameters", cat(bytes.parameters)},
                  {"gradients", cat(bytes.gradients)},
                  {"master weights", cat(bytes.master)},
                  {"optimizer states", cat(bytes.optimizer)},
                  {"total", cat(bytes.total())},
                  {"offloaded, in host memory", cat(report.plan.offloaded_bytes.host_total())},
                  {"offloaded, in files", cat(report.plan.offloaded_bytes.file)},
                  {"gathered parameters, in a step", cat(report.plan.step_bytes.gathered)},
                  {"secondary slices, in a step", cat(report.plan.step_bytes.secondary)},
                  {"activations, in a step", report.plan.activation_bytes > 0 ? cat(report.plan.activation_bytes)
                                                                              : "unknown: --activation_bytes N"},
                  {"gradient compression", cat(report.plan.compression_bytes)},
                  {"on a GPU, beside: context", cat(overhead.context)},
                  {cat("on a GPU, beside: NCCL, ", overhead.groups, " groups"), cat(overhead.nccl)},
                  {"on a GPU, beside: cuBLAS", cat(overhead.workspaces)},
                  {stages > 1 ? "sent in a step, but to other stages" : "sent in a step",
                   report.sent_bytes ? cat(*report.sent_bytes) : "depends on gradient_compression"}};
  if (report.tensor_sent_per_token) {
    rows.emplace_back("sent along the tensor axis, for a token", fixed(*report.tensor_sent_per_token, 0));
    rows.emplace_back("sent along the tensor axis, in a step",
                      report.tensor_sent ? fixed(*report.tensor_sent, 0) : "unknown: --tokens N of a micro-batch");
  }
  print_columns(rows, out);
}

void print(const Report& report, std::ostream& out) {
  out << shown_text(report.config.source) << ": fine for " << report.plan.topology.world_size
      << (report.plan.topology.world_size == 1 ? " rank" : " ranks") << "\n\nValues (all of them: --json)\n";
  print_columns(resolved_values(report.config), out);
  if (report.config.elastic) out << "\nElasticity\n  " << elastic_in_words(report) << '\n';
  if (!report.config.resolved_auto.empty()) {
    Columns rows;
    for (const engine::config::ResolvedAuto& entry : report.config.resolved_auto) {
      const bool assumed = entry.source == engine::config::kAssumed;
      rows.emplace_back(entry.path, assumed ? cat(shown(entry.value), " assumed; --auto ", entry.path, "=VALUE")
                                            : cat(shown(entry.value), " from ", entry.source));
    }
    out << "\n\"auto\" became\n";
    print_columns(rows, out);
  }
  if (!report.explained.empty()) out << "\nKeys of the file\n";
  for (const ExplainedKey& key : report.explained) {
    out << "  " << shown_text(key.path) << "\n      " << key.text << '\n';
  }
  const std::vector<std::string> warnings = warnings_of(report);
  if (!warnings.empty()) out << "\nWarnings\n";
  for (const std::string& warning : warnings) out << "  " << shown_message(warning) << '\n';
  if (report.splits) {
    out << "\nParameters over " << report.splits->ranks << (report.splits->ranks == 1 ? " rank" : " ranks") << '\n';
    print(*report.splits, out);
  }
  out << "\nPlan\n" << engine::to_table(report.plan) << '\n';
  if (!report.plan.bytes) {
    out << "\nGive --parameters N, or --split_parameters FILE, for the bytes of model state per rank.\n";
    return;
  }
  print_bytes(report, out);
}

}  // namespace

int check(const CheckOptions& options, std::ostream& out, std::ostream& err) {
  try {
    const Report report = examine(options);
    if (options.json) {
      out << to_json(report).dump(2, ' ', false, ordered_json::error_handler_t::replace) << '\n';
    } else {
      print(report, out);
    }
    out.flush();
    require<IoError>(out.good(), "the report cannot be written; check the disk or the program that reads it");
    return kFine;
  } catch (const Error& error) {
    err << shown_message(error.what()) << '\n';
    if (options.json) {
      const ordered_json refusal = {{"ok", false}, {"error", shown_message(error.what())}};
      out << refusal.dump(2, ' ', false, ordered_json::error_handler_t::replace) << std::endl;
    }
    return kRefused;
  }
}

void add_check(CLI::App& app, Command& chosen) {
  const auto options = std::make_shared<CheckOptions>();
  CLI::App* flags = app.add_subcommand(
      "check", "Resolves a ds_config: values, plan and bytes per rank. Exit code 0: it runs; 2: it does not.");
  flags->add_option("config", options->config, "The ds_config: a file, or url-safe base64 of JSON")
      ->required()
      ->type_name("CONFIG");
  flags->add_option("--world_size,--ranks", options->world_size, "Number of ranks")
      ->transform(whole_number(1, kMostRanks))
      ->capture_default_str()
      ->type_name("N");
  flags
      ->add_option("--ranks_per_node", options->ranks_per_node,
                   "Consecutive ranks of a host: warns where a tensor axis leaves one")
      ->transform(whole_number(1, kMostRanks))
      ->type_name("N");
  flags->add_option("--parameters", options->parameters, "Trainable elements of the model")
      ->transform(whole_number(1, kMostParameters))
      ->type_name("N");
  flags
      ->add_option("--split_parameters", options->split_parameters,
                   "The model's parameters, in place of their number, and what tensor_parallel cuts of them: a "
                   ".safetensors file, a folder of such, or JSON {\"name\": [sizes], ...}")
      ->type_name("FILE");
  flags->add_option("--tokens", options->tokens, "Tokens of a micro-batch on one rank, for what a tensor axis sends")
      ->transform(whole_number(1, kMostWidth))
      ->type_name("N");
  flags
      ->add_option("--activation_bytes", options->activation_bytes,
                   "Bytes of activations of a micro-batch on one rank, as a run with memory_breakdown reports them")
      ->transform(whole_number(0, kMostBytes))
      ->type_name("N");
  flags
      ->add_option("--auto", options->auto_values,
                   "What the program gives for an \"auto\", as lr=1e-4, optimizer.params.lr=1e-4 or hidden_size=4096; "
                   "repeatable. The rest is assumed, as Hugging Face's trainer without arguments")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
  flags->add_flag("--strict", options->strict, "Unknown keys are errors");
  flags->add_flag("--explain", options->explain, "Say of each key of the file what it does, and what holds without it");
  flags->add_flag("--json", options->json, "Print one JSON object, every key with its value");
  flags->callback([options, &chosen] { chosen = [options] { return check(*options, std::cout, std::cerr); }; });
}

}  // namespace ds::tool
