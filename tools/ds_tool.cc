// ds-tool COMMAND ...: looks at configs, schedules, checkpoints and machines without starting a job.
//
// A command either runs here, free of LibTorch, or is a program beside this one, which gets the arguments after its
// name. To add one: a line in a list below; for the first kind, its flags in NAME_flags.cc (commands.h).
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <exception>
#include <filesystem>
#include <iostream>
#include <string_view>

#include "core/check.h"
#include "tools/commands.h"

namespace {

constexpr int kUsageError = 2;

constexpr ds::tool::AddCommand kCommands[] = {ds::tool::add_check, ds::tool::add_schedule, ds::tool::add_simulate,
                                              ds::tool::add_report, ds::tool::add_explain};

struct Program {
  const char* command;
  const char* file;  // in the folder of this program
  const char* help;
};

constexpr std::array kPrograms = {
    Program{"checkpoint", "ds-tool-checkpoint",
            "Looks at checkpoints and converts them: inspect, verify, diff, convert"},
    Program{"bench", "ds-tool-bench",
            "Measures collectives between ranks, as nccl-tests does: ds-launch --num_procs N ds-tool bench"},
};

// Becomes that program, with the arguments from the command's name on.
[[noreturn]] void become(const Program& program, char** arguments) {
  const std::filesystem::path own = std::filesystem::read_symlink("/proc/self/exe");
  const std::string file = (own.parent_path() / program.file).string();
  execv(file.c_str(), arguments);
  throw ds::IoError(ds::cat(file, ": cannot be run: ", std::strerror(errno), "; `ds-tool ", program.command,
                            "` needs it beside ds-tool, where the build and the installation put it"));
}

int run(int argc, char** argv) {
  CLI::App app(
      "Looks at ds_config files, pipeline schedules, checkpoints and machines, predicts steps and measures "
      "collectives, without starting a training.",
      "ds-tool");
  app.set_version_flag("--version", DS_VERSION);
  app.require_subcommand(1);
  ds::tool::Command chosen;
  for (const ds::tool::AddCommand add : kCommands) add(app, chosen);
  for (const Program& program : kPrograms) {
    if (argc > 1 && std::string_view(argv[1]) == program.command) become(program, argv + 1);
    app.add_subcommand(program.command, program.help);  // for the help
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsageError;
  }
  ds::require(chosen != nullptr, "expected the command to be the first argument");
  return chosen();
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
