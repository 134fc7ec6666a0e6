#include "tools/simulate_command.h"

#include <charconv>
#include <cstdint>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/shown_text.h"
#include "dsengine/config.h"
#include "launcher/command_line/number_flags.h"
#include "tools/commands.h"
#include "tools/flag_limits.h"
#include "tools/forecast.h"
#include "tools/simulation.h"

namespace ds::tool {
namespace {

using nlohmann::ordered_json;
using pipeline::StageTimes;

constexpr int kSimulated = 0;
constexpr int kDoesNotFit = 1;
constexpr int kWrong = 2;

constexpr double kMillisecond = 1e-3;

// Beyond these products of numbers would be infinite, and what is divided by them.
constexpr double kLeast = 1e-15;
constexpr double kMost = 1e30;

void require_positive(const std::optional<double>& value, const char* flag) {
  require<ConfigError>(!value || (*value >= kLeast && *value <= kMost), flag, ": expected a positive number from ",
                       kLeast, " to ", kMost, ", found ", value.value_or(0));
}

void require_not_negative(double value, const char* flag) {
  require<ConfigError>(value >= 0 && value <= kMost, flag, ": expected a number of at least 0 and at most ", kMost,
                       ", found ", value);
}

// "1.5,2"
std::vector<double> parse_list(const std::string& text, const char* flag) {
  std::vector<double> numbers;
  const char* next = text.data();
  const char* const end = next + text.size();
  for (;;) {
    double number = 0;
    const auto [after, error] = std::from_chars(next, end, number);
    const bool separated = after == end || (*after == ',' && after + 1 != end);
    require<ConfigError>(error == std::errc() && separated, flag, ": expected numbers, as in \"1.5,2\", found \"",
                         shown_text(text), "\"");
    require_not_negative(number, flag);
    numbers.push_back(number);
    if (after == end) return numbers;
    next = after + 1;
  }
}

std::vector<StageTimes> measured_times(const SimulateOptions& options) {
  const bool any =
      !(options.forward_ms.empty() && options.backward_input_ms.empty() && options.backward_weight_ms.empty());
  if (!any) return {};
  require<ConfigError>(
      !options.forward_ms.empty() && !options.backward_input_ms.empty() && !options.backward_weight_ms.empty(),
      "ds-tool simulate: --forward_ms, --backward_input_ms and --backward_weight_ms belong together; give all three ",
      "(of a backward in one pass, half to each)");
  const std::vector<double> forward = parse_list(options.forward_ms, "--forward_ms");
  const std::vector<double> input = parse_list(options.backward_input_ms, "--backward_input_ms");
  const std::vector<double> weight = parse_list(options.backward_weight_ms, "--backward_weight_ms");
  require<ConfigError>(forward.size() == input.size() && forward.size() == weight.size(),
                       "ds-tool simulate: expected as many numbers for --forward_ms, --backward_input_ms and ",
                       "--backward_weight_ms, found ", forward.size(), ", ", input.size(), " and ", weight.size());
  std::vector<StageTimes> times;
  for (size_t s = 0; s < forward.size(); ++s) {
    times.push_back({forward[s] * kMillisecond, input[s] * kMillisecond, weight[s] * kMillisecond});
  }
  return times;
}

// Refuses a schedule with more actions than memory holds.
void require_schedule_size(const engine::config::DsConfig& config) {
  const int64_t micro_batches = config.gradient_accumulation_steps;
  const double forwards = static_cast<double>(micro_batches) * static_cast<double>(config.pipeline.stages.value_or(1)) *
                          static_cast<double>(config.pipeline.chunks.value_or(1));
  require<ConfigError>(micro_batches <= kMostMicroBatches && forwards <= static_cast<double>(kMostForwards),
                       "ds-tool simulate: expected gradient_accumulation_steps of at most ", kMostMicroBatches,
                       ", and of pipeline.stages x pipeline.chunks x gradient_accumulation_steps at most ",
                       kMostForwards, ", found ", micro_batches, " and ", forwards);
}

// Each micro-batch reduces or gathers the parameters.
void require_traffic(const engine::config::DsConfig& config, int64_t parameters) {
  constexpr double kMostElements = 0x1p57;  // of 4 bytes, gathered twice: 2^60 bytes
  const double elements = static_cast<double>(parameters) * static_cast<double>(config.gradient_accumulation_steps);
  require<ConfigError>(elements <= kMostElements, "ds-tool simulate: expected at most 2^57 for parameters x ",
                       "gradient_accumulation_steps, found ", elements);
}

std::vector<LayerCost> model_of(const SimulateOptions& options, const engine::config::DsConfig& config,
                                const TensorRanks& tensor) {
  const bool sums = options.parameters || options.flops || options.activation_bytes || options.message_bytes;
  const bool gpt = options.hidden || options.heads || options.vocab;
  require<ConfigError>(sums != gpt, "ds-tool simulate: expected a GPT (--layers, --hidden, --heads, --seq_len and ",
                       "--vocab) or the sums of a model (--parameters, --flops, --activation_bytes and ",
                       "--message_bytes), found ", gpt ? "both" : "neither");
  const int64_t stages = config.pipeline.stages.value_or(1);
  if (sums) {
    require<ConfigError>(options.parameters.has_value(), "ds-tool simulate: expected --parameters, a positive number");
    const bool timed = !options.forward_ms.empty();
    require<ConfigError>(timed || options.flops, "ds-tool simulate: expected --flops, the operations of forward for a ",
                         "micro-batch, or measured times (--forward_ms ...)");
    const int64_t by_default = stages * config.pipeline.chunks.value_or(1);
    require_not_negative(options.flops.value_or(0), "--flops");
    require_not_negative(options.activation_bytes.value_or(0), "--activation_bytes");
    require_not_negative(options.message_bytes.value_or(0), "--message_bytes");
    return equal_layers({.layers = options.layers.value_or(by_default),
                         .parameters = *options.parameters,
                         .flops = options.flops.value_or(0),
                         .activation_bytes = options.activation_bytes.value_or(0),
                         .output_bytes = options.message_bytes.value_or(0)},
                        tensor);
  }
  require<ConfigError>(options.layers && options.hidden && options.heads && options.seq_len && options.vocab,
                       "ds-tool simulate: a GPT needs all of --layers, --hidden, --heads, --seq_len and --vocab");
  return gpt_layers({.layers = *options.layers,
                     .hidden = *options.hidden,
                     .heads = *options.heads,
                     .seq_len = *options.seq_len,
                     .vocab = *options.vocab,
                     .tied = options.tied,
                     .flash_attention = options.flash_attention},
                    config.train_micro_batch_size_per_gpu, bytes_of(config.model_dtype()), tensor);
}

Machine machine_of(const SimulateOptions& options) {
  constexpr double kTera = 1e12;
  constexpr double kBytesPerGigabit = 1e9 / 8;
  require<ConfigError>(options.ranks > 0 && options.ranks <= kMostSimulatedRanks, "--ranks: expected a whole number ",
                       "from 1 to ", kMostSimulatedRanks, ", found ", options.ranks);
  require<ConfigError>(options.ranks_per_node > 0 && options.ranks_per_node <= kMostRanks,
                       "--ranks_per_node: expected ", "a whole number from 1 to ", kMostRanks, ", found ",
                       options.ranks_per_node);
  require_positive(options.tflops, "--tflops");
  require_positive(options.link_gbps, "--link_gbps");
  require_positive(options.node_gbps, "--node_gbps");
  require_positive(options.memory_gib, "--memory_gib");
  require_not_negative(options.latency_us, "--latency_us");
  require<ConfigError>(options.tflops || !options.forward_ms.empty(), "ds-tool simulate: expected --tflops, the 10^12 ",
                       "operations that a rank achieves in a second, or measured times (--forward_ms ...)");
  const std::optional<double> link = options.link_gbps ? options.link_gbps : options.node_gbps;
  const std::optional<double> node = options.node_gbps ? options.node_gbps : options.link_gbps;
  require<ConfigError>(options.ranks == 1 || link, "ds-tool simulate: expected --link_gbps, the 10^9 bits that a node ",
                       "sends to others in a second, --node_gbps, that a rank sends inside a node, or both");
  return {.ranks = options.ranks,
          .ranks_per_node = options.ranks_per_node,
          .flops = options.tflops.value_or(1) * kTera,
          .node_rate = node.value_or(1) * kBytesPerGigabit,
          .link_rate = link.value_or(1) * kBytesPerGigabit,
          .latency = options.latency_us * 1e-6};
}

Forecast examine(const SimulateOptions& options) {
  Forecast forecast;
  SimulationQuestion question;
  question.machine = machine_of(options);
  question.config = engine::config::parse(options.config, {.world_size = options.ranks, .strict = options.strict});
  require_schedule_size(question.config);
  const engine::config::TensorParallelSection& tensor = question.config.tensor_parallel;
  question.layers =
      model_of(options, question.config, {.count = tensor.size(), .sequence_parallel = tensor.sequence_parallel});
  forecast.parameters = count_parameters(model_of(options, question.config, {}));
  require_traffic(question.config, forecast.parameters);
  question.activation_checkpoint_interval =
      options.activation_checkpointing ? 1 : question.config.pipeline.activation_checkpoint_interval;
  question.stage_times = measured_times(options);
  if (options.message_ms) {
    require_not_negative(*options.message_ms, "--message_ms");
    question.message = pipeline::MessageTimes{.transfer = *options.message_ms * kMillisecond};
  }
  require_not_negative(options.update_ms, "--update_ms");
  question.update_seconds = options.update_ms * kMillisecond;
  forecast.simulation = simulate_step(question);
  forecast.machine = question.machine;
  forecast.layers = question.layers.size();
  if (options.memory_gib) forecast.limit = *options.memory_gib * kGibibyte;
  if (options.seq_len) forecast.tokens_of_sample = static_cast<double>(*options.seq_len);
  forecast.update_known = options.update_ms > 0;
  forecast.config = std::move(question.config);
  return forecast;
}

constexpr const char* kModelled =
    R"(Modelled: the schedule's actions on every rank of a pipeline, each stage's operations over --tflops (or measured
times), messages between stages beside them, collectives of ZeRO as rings, beside backward and the first forward where the
config says so; sums over ranks that share layers (tensor_parallel), which computing waits for; ranks of a node share its
link. Rank = (pipeline rank x data-parallel ranks + data-parallel rank) x tensor ranks + tensor rank. Between stages
with a tensor axis each rank sends to the one with its tensor rank: its part of a sequence that is cut, else all of the
activation, or between nodes a T-th, which the receivers gather (pipe_partitioned; grad_partitioned). Memory:
model state, what is gathered, activations that the schedule holds at once, messages. Activations of a block:
34 s b h + 5 a s^2 b bytes at 16 bits (arXiv:2205.05198).
Not modelled: other speeds of other kernels, other users of links, stragglers, reading data, the norm, the update
(--update_ms), copies and updates of offloaded state, the two levels of quantized gradients, stage3_max_reuse_distance,
workspaces. Compressed gradients are refused.)";

void add_simulated_model(CLI::App& simulate, SimulateOptions& options) {
  constexpr const char* kGpt = "Model: a GPT ...";
  simulate.add_option("--layers", options.layers, "Blocks; or equal layers of a model given by sums")
      ->transform(whole_number(1, kMostLayers))
      ->type_name("N")
      ->group(kGpt);
  simulate.add_option("--hidden", options.hidden, "Width")
      ->transform(whole_number(1, kMostWidth))
      ->type_name("N")
      ->group(kGpt);
  simulate.add_option("--heads", options.heads, "Attention heads")
      ->transform(whole_number(1, kMostWidth))
      ->type_name("N")
      ->group(kGpt);
  simulate.add_option("--seq_len", options.seq_len, "Tokens of a sample")
      ->transform(whole_number(1, kMostWidth))
      ->type_name("N")
      ->group(kGpt);
  simulate.add_option("--vocab", options.vocab, "Tokens there are")
      ->transform(whole_number(1, kMostWidth))
      ->type_name("N")
      ->group(kGpt);
  simulate.add_flag("--tied", options.tied, "The head has the weights of the embedding")->group(kGpt);
  simulate.add_flag("--flash_attention", options.flash_attention, "Attention keeps no scores")->group(kGpt);
  constexpr const char* kSums = "... or sums of any";
  simulate.add_option("--parameters", options.parameters, "Trainable elements")
      ->transform(whole_number(1, kMostParameters))
      ->type_name("N")
      ->group(kSums);
  simulate.add_option("--flops", options.flops, "Operations of forward, of a micro-batch")
      ->check(real_number(0))
      ->type_name("N")
      ->group(kSums);
  simulate.add_option("--activation_bytes", options.activation_bytes, "Kept for backward, of a micro-batch")
      ->check(real_number(0))
      ->type_name("N")
      ->group(kSums);
  simulate.add_option("--message_bytes", options.message_bytes, "What a stage sends the next, of a micro-batch")
      ->check(real_number(0))
      ->type_name("N")
      ->group(kSums);
  simulate
      .add_flag("--activation_checkpointing", options.activation_checkpointing,
                "Layers keep their input only (else pipeline.activation_checkpoint_interval)")
      ->group("Model");
}

void add_simulated_machine(CLI::App& simulate, SimulateOptions& options) {
  constexpr const char* kMachine = "Machine";
  simulate.add_option("--tflops", options.tflops, "10^12 operations a second, of a rank, as achieved")
      ->check(real_number(0, true))
      ->type_name("X")
      ->group(kMachine);
  simulate.add_option("--link_gbps", options.link_gbps, "10^9 bits a second that a node sends to others [--node_gbps]")
      ->check(real_number(0, true))
      ->type_name("X")
      ->group(kMachine);
  simulate
      .add_option("--node_gbps", options.node_gbps, "10^9 bits a second that a rank sends in its node [--link_gbps]")
      ->check(real_number(0, true))
      ->type_name("X")
      ->group(kMachine);
  simulate.add_option("--ranks_per_node", options.ranks_per_node, "Consecutive ranks of a node")
      ->transform(whole_number(1, kMostRanks))
      ->capture_default_str()
      ->type_name("N")
      ->group(kMachine);
  simulate.add_option("--latency_us", options.latency_us, "Microseconds of a message of no length")
      ->check(real_number(0))
      ->capture_default_str()
      ->type_name("X")
      ->group(kMachine);
  simulate.add_option("--memory_gib", options.memory_gib, "Memory of a rank; names those that need more")
      ->type_name("X")
      ->group(kMachine);
  constexpr const char* kMeasured = "Measured, milliseconds; one number, or one for each stage (1.5,2)";
  simulate.add_option("--forward_ms", options.forward_ms, "Forward of a micro-batch")
      ->type_name("X,..")
      ->group(kMeasured);
  simulate.add_option("--backward_input_ms", options.backward_input_ms, "Backward, gradients of the input")
      ->type_name("X,..")
      ->group(kMeasured);
  simulate.add_option("--backward_weight_ms", options.backward_weight_ms, "Backward, gradients of the weights")
      ->type_name("X,..")
      ->group(kMeasured);
  simulate.add_option("--message_ms", options.message_ms, "A message between stages")
      ->check(real_number(0))
      ->type_name("X")
      ->group(kMeasured);
  simulate.add_option("--update_ms", options.update_ms, "Norm and optimizer, once a step")
      ->check(real_number(0))
      ->type_name("X")
      ->group(kMeasured);
}

}  // namespace

int simulate(const SimulateOptions& options, std::ostream& out, std::ostream& err) {
  try {
    const Forecast forecast = examine(options);
    if (options.json) {
      out << to_json(forecast, options.per_rank).dump(2, ' ', false, ordered_json::error_handler_t::replace) << '\n';
    } else {
      print(forecast, options.per_rank, out);
    }
    out.flush();
    require<IoError>(out.good(), "the forecast cannot be written; check the disk or the program that reads it");
    return forecast.fits() ? kSimulated : kDoesNotFit;
  } catch (const Error& error) {
    err << shown_message(error.what()) << '\n';
    if (options.json) {
      const ordered_json refusal = {{"ok", false}, {"error", shown_message(error.what())}};
      out << refusal.dump(2, ' ', false, ordered_json::error_handler_t::replace) << std::endl;
    }
    return kWrong;
  }
}

void add_simulate(CLI::App& app, Command& chosen) {
  const auto options = std::make_shared<SimulateOptions>();
  CLI::App* flags = app.add_subcommand("simulate",
                                       "Predicts a step of thousands of ranks: time, bubble, bytes sent and memory. "
                                       "Exit code 0: done; 1: ranks need more "
                                       "than --memory_gib; 2: the config or an option is wrong.");
  flags->footer(kModelled);
  flags->add_option("config", options->config, "The ds_config: a file, or url-safe base64 of JSON")
      ->required()
      ->type_name("CONFIG");
  flags->add_option("--ranks,--world_size", options->ranks, "Ranks of the job; pipeline.stages of them make a pipeline")
      ->transform(whole_number(1, kMostSimulatedRanks))
      ->capture_default_str()
      ->type_name("N");
  add_simulated_model(*flags, *options);
  add_simulated_machine(*flags, *options);
  flags->add_flag("--per_rank", options->per_rank, "Print every rank of a pipeline, not the fullest alone");
  flags->add_flag("--strict", options->strict, "Unknown keys of the config are errors");
  flags->add_flag("--json", options->json, "Print one JSON object");
  flags->callback([options, &chosen] { chosen = [options] { return simulate(*options, std::cout, std::cerr); }; });
}

}  // namespace ds::tool
