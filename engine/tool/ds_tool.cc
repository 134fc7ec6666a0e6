// ds-tool check CONFIG [--world_size N] [--parameters N] [--strict] [--json]
// ds-tool schedule --kind 1f1b --stages 4 --micro_batches 8 [--svg FILE] ...
// ds-tool simulate CONFIG --ranks 4096 --layers 96 --hidden 12288 ... --tflops 150 --link_gbps 400
// ds-tool checkpoint inspect|verify|diff|convert ...   runs ds-tool-checkpoint, which loads LibTorch; this one does not
#include <sys/ioctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <exception>
#include <filesystem>
#include <iostream>
#include <string>

#include "core/check.h"
#include "engine/tool/check_command.h"
#include "engine/tool/schedule_command.h"
#include "engine/tool/simulate_command.h"

namespace {

constexpr int kUsageError = 2;
constexpr int64_t kMostRanks = 1 << 24;
constexpr int64_t kMostParameters = int64_t{1} << 50;
constexpr int kPlainWidth = 120;  // of what is no terminal

// Becomes ds-tool-checkpoint, which lies beside this program, with the arguments after "checkpoint".
[[noreturn]] void run_checkpoint_tool(char** arguments) {
  const std::filesystem::path own = std::filesystem::read_symlink("/proc/self/exe");
  const std::string program = (own.parent_path() / "ds-tool-checkpoint").string();
  execv(program.c_str(), arguments);
  throw ds::IoError(
      ds::cat(program, ": cannot be run: ", std::strerror(errno),
              "; `ds-tool checkpoint` needs it beside ds-tool, where the build and the installation put it"));
}

void add_check(CLI::App& app, ds::tool::CheckOptions& options) {
  CLI::App* check = app.add_subcommand(
      "check", "Resolves a ds_config: values, plan and bytes per rank. Exit code 0: it runs; 2: it does not.");
  check->add_option("config", options.config, "The ds_config: a file, or url-safe base64 of JSON")
      ->required()
      ->type_name("CONFIG");
  check->add_option("--world_size", options.world_size, "Number of ranks")
      ->check(CLI::Range(int64_t{1}, kMostRanks))
      ->capture_default_str()
      ->type_name("N");
  check->add_option("--parameters", options.parameters, "Trainable elements of the model")
      ->check(CLI::Range(int64_t{1}, kMostParameters))
      ->type_name("N");
  check
      ->add_option("--activation_bytes", options.activation_bytes,
                   "Bytes of activations of a micro-batch on one rank, as a run with memory_breakdown reports them")
      ->check(CLI::Range(int64_t{0}, kMostParameters))
      ->type_name("N");
  check->add_flag("--strict", options.strict, "Unknown keys are errors");
  check->add_flag("--json", options.json, "Print one JSON object, every key with its value");
}

CLI::App* add_schedule(CLI::App& app, ds::tool::ScheduleOptions& options) {
  CLI::App* schedule = app.add_subcommand(
      "schedule", "Draws a pipeline schedule: when each rank does what. Exit code 0: it is sound; 2: it is not.");
  schedule->add_option("--kind", options.kind, "gpipe, 1f1b, interleaved, zb_h1, zb_h2, zbv, dualpipev or inference")
      ->type_name("KIND");
  schedule->add_option("--stages", options.stages, "Ranks of the pipeline")->type_name("N");
  schedule->add_option("--micro_batches", options.micro_batches, "Micro-batches of a batch")->type_name("N");
  schedule
      ->add_option("--chunks", options.chunks,
                   "Stages a rank; 2 by default for interleaved, zbv and dualpipev, 1 for the others")
      ->type_name("N");
  schedule->add_option("--file", options.file, "A schedule as CSV, a line for each rank, instead of the above")
      ->type_name("FILE");
  schedule
      ->add_option("--times", options.times,
                   "Times of forward, backward of the input and of the weights (1,1,1, or as --measured has them)")
      ->type_name("F,I,W");
  schedule->add_option("--message", options.message, "Time of a message from one rank to another")->type_name("TIME");
  schedule->add_option("--measured", options.measured, "A trace of a step, or a folder of traces, to compare with")
      ->type_name("PATH");
  schedule->add_option("--csv", options.csv, "File to write the schedule to")->type_name("FILE");
  schedule->add_option("--svg", options.svg, "File to draw the timetable to")->type_name("FILE");
  schedule->add_flag("--list", options.list, "Print each rank's actions, with messages");
  schedule->add_flag("--json", options.json, "Print one JSON object");
  return schedule;
}

constexpr const char* kSimulated =
    R"(Modelled: the schedule's actions on every rank of a pipeline, each stage's operations over --tflops (or measured
times), messages between stages beside them, collectives of ZeRO as rings, beside backward and the first forward where the
config says so; ranks of a node share its link. Rank = pipeline rank x data-parallel ranks + data-parallel rank. Memory:
model state, what is gathered, activations that the schedule holds at once, messages. Activations of a block:
34 s b h + 5 a s^2 b bytes at 16 bits (arXiv:2205.05198).
Not modelled: other speeds of other kernels, other users of links, stragglers, reading data, the norm, the update
(--update_ms), copies and updates of offloaded state, the two levels of quantized gradients, stage3_max_reuse_distance,
workspaces. Compressed gradients are refused.)";

void add_simulated_model(CLI::App& simulate, ds::tool::SimulateOptions& options) {
  constexpr const char* kGpt = "Model: a GPT ...";
  simulate.add_option("--layers", options.layers, "Blocks; or equal layers of a model given by sums")
      ->type_name("N")
      ->group(kGpt);
  simulate.add_option("--hidden", options.hidden, "Width")->type_name("N")->group(kGpt);
  simulate.add_option("--heads", options.heads, "Attention heads")->type_name("N")->group(kGpt);
  simulate.add_option("--seq_len", options.seq_len, "Tokens of a sample")->type_name("N")->group(kGpt);
  simulate.add_option("--vocab", options.vocab, "Tokens there are")->type_name("N")->group(kGpt);
  simulate.add_flag("--tied", options.tied, "The head has the weights of the embedding")->group(kGpt);
  simulate.add_flag("--flash_attention", options.flash_attention, "Attention keeps no scores")->group(kGpt);
  constexpr const char* kSums = "... or sums of any";
  simulate.add_option("--parameters", options.parameters, "Trainable elements")->type_name("N")->group(kSums);
  simulate.add_option("--flops", options.flops, "Operations of forward, of a micro-batch")
      ->type_name("N")
      ->group(kSums);
  simulate.add_option("--activation_bytes", options.activation_bytes, "Kept for backward, of a micro-batch")
      ->type_name("N")
      ->group(kSums);
  simulate.add_option("--message_bytes", options.message_bytes, "What a stage sends the next, of a micro-batch")
      ->type_name("N")
      ->group(kSums);
  simulate
      .add_flag("--activation_checkpointing", options.activation_checkpointing,
                "Layers keep their input only (else pipeline.activation_checkpoint_interval)")
      ->group("Model");
}

void add_simulated_machine(CLI::App& simulate, ds::tool::SimulateOptions& options) {
  constexpr const char* kMachine = "Machine";
  simulate.add_option("--tflops", options.tflops, "10^12 operations a second, of a rank, as achieved")
      ->type_name("X")
      ->group(kMachine);
  simulate.add_option("--link_gbps", options.link_gbps, "10^9 bits a second that a node sends to others [--node_gbps]")
      ->type_name("X")
      ->group(kMachine);
  simulate
      .add_option("--node_gbps", options.node_gbps, "10^9 bits a second that a rank sends in its node [--link_gbps]")
      ->type_name("X")
      ->group(kMachine);
  simulate.add_option("--ranks_per_node", options.ranks_per_node, "Consecutive ranks of a node")
      ->capture_default_str()
      ->type_name("N")
      ->group(kMachine);
  simulate.add_option("--latency_us", options.latency_us, "Microseconds of a message of no length")
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
  simulate.add_option("--message_ms", options.message_ms, "A message between stages")->type_name("X")->group(kMeasured);
  simulate.add_option("--update_ms", options.update_ms, "Norm and optimizer, once a step")
      ->type_name("X")
      ->group(kMeasured);
}

const CLI::App* add_simulate(CLI::App& app, ds::tool::SimulateOptions& options) {
  CLI::App* simulate = app.add_subcommand("simulate",
                                          "Predicts a step of thousands of ranks: time, bubble, bytes sent and memory. "
                                          "Exit code 0: done; 1: ranks need more "
                                          "than --memory_gib; 2: the config or an option is wrong.");
  simulate->footer(kSimulated);
  simulate->add_option("config", options.config, "The ds_config: a file, or url-safe base64 of JSON")
      ->required()
      ->type_name("CONFIG");
  simulate->add_option("--ranks", options.ranks, "Ranks of the job; pipeline.stages of them make a pipeline")
      ->check(CLI::Range(int64_t{1}, kMostRanks))
      ->capture_default_str()
      ->type_name("N");
  add_simulated_model(*simulate, options);
  add_simulated_machine(*simulate, options);
  simulate->add_flag("--per_rank", options.per_rank, "Print every rank of a pipeline, not the fullest alone");
  simulate->add_flag("--strict", options.strict, "Unknown keys of the config are errors");
  simulate->add_flag("--json", options.json, "Print one JSON object");
  return simulate;
}

// Colour and the whole width on a terminal alone.
void fit_to_terminal(ds::tool::ScheduleOptions& options) {
  winsize size{};
  options.color = isatty(STDOUT_FILENO) == 1;
  const bool known = options.color && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  options.width = known ? size.ws_col : kPlainWidth;
}

int run(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "checkpoint") run_checkpoint_tool(argv + 1);
  CLI::App app(
      "Looks at ds_config files, pipeline schedules and checkpoints, and predicts steps, without starting a job.",
      "ds-tool");
  app.set_version_flag("--version", DS_VERSION);
  app.require_subcommand(1);
  ds::tool::CheckOptions check_options;
  add_check(app, check_options);
  ds::tool::ScheduleOptions schedule_options;
  const CLI::App* schedule = add_schedule(app, schedule_options);
  ds::tool::SimulateOptions simulate_options;
  const CLI::App* simulate = add_simulate(app, simulate_options);
  // For the help; it has been dealt with above.
  app.add_subcommand("checkpoint", "Looks at checkpoints and converts them: inspect, verify, diff, convert");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsageError;
  }
  ds::require(!app.got_subcommand("checkpoint"), "expected `checkpoint` to be the first argument");
  if (schedule->parsed()) {
    fit_to_terminal(schedule_options);
    return ds::tool::schedule(schedule_options, std::cout, std::cerr);
  }
  if (simulate->parsed()) return ds::tool::simulate(simulate_options, std::cout, std::cerr);
  return ds::tool::check(check_options, std::cout, std::cerr);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "ds-tool: " << error.what() << '\n';
    return kUsageError;
  }
}
