// ds-tool check CONFIG [--world_size N] [--parameters N] [--strict] [--json]
// ds-tool checkpoint inspect|verify|diff|convert ...   runs ds-tool-checkpoint, which loads LibTorch; this one does not
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

namespace {

constexpr int kUsageError = 2;
constexpr int64_t kMostRanks = 1 << 24;
constexpr int64_t kMostParameters = int64_t{1} << 50;

// Becomes ds-tool-checkpoint, which lies beside this program, with the arguments after "checkpoint".
[[noreturn]] void run_checkpoint_tool(char** arguments) {
  const std::filesystem::path own = std::filesystem::read_symlink("/proc/self/exe");
  const std::string program = (own.parent_path() / "ds-tool-checkpoint").string();
  execv(program.c_str(), arguments);
  throw ds::IoError(
      ds::cat(program, ": cannot be run: ", std::strerror(errno),
              "; `ds-tool checkpoint` needs it beside ds-tool, where the build and the installation put it"));
}

int run(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "checkpoint") run_checkpoint_tool(argv + 1);
  CLI::App app("Looks at ds_config files and checkpoints without starting a job.", "ds-tool");
  app.set_version_flag("--version", DS_VERSION);
  app.require_subcommand(1);
  ds::tool::CheckOptions options;
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
  // For the help; it has been dealt with above.
  app.add_subcommand("checkpoint", "Looks at checkpoints and converts them: inspect, verify, diff, convert");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsageError;
  }
  ds::require(!app.got_subcommand("checkpoint"), "expected `checkpoint` to be the first argument");
  return ds::tool::check(options, std::cout, std::cerr);
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
