// ds-tool check CONFIG [--world_size N] [--parameters N] [--strict] [--json]
// ds-tool schedule --kind 1f1b --stages 4 --micro_batches 8 [--svg FILE] ...
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

// Colour and the whole width on a terminal alone.
void fit_to_terminal(ds::tool::ScheduleOptions& options) {
  winsize size{};
  options.color = isatty(STDOUT_FILENO) == 1;
  const bool known = options.color && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  options.width = known ? size.ws_col : kPlainWidth;
}

int run(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "checkpoint") run_checkpoint_tool(argv + 1);
  CLI::App app("Looks at ds_config files, pipeline schedules and checkpoints without starting a job.", "ds-tool");
  app.set_version_flag("--version", DS_VERSION);
  app.require_subcommand(1);
  ds::tool::CheckOptions check_options;
  add_check(app, check_options);
  ds::tool::ScheduleOptions schedule_options;
  const CLI::App* schedule = add_schedule(app, schedule_options);
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
