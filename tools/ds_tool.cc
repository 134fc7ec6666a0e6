// ds-tool COMMAND ...: looks at configs, schedules, checkpoints and machines without starting a job.
//
// A command either runs here, free of LibTorch, or is a program beside this one, which gets the arguments after its
// name. To add one: a line in a list below; for the first kind, a file NAME_command.cc with its flags (commands.h).
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <exception>
#include <filesystem>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "core/json/near_miss.h"
#include "core/shown_text.h"
#include "tools/command_line.h"
#include "tools/commands.h"

namespace {

using ds::tool::kUsageError;

constexpr ds::tool::AddCommand kCommands[] = {ds::tool::add_check,  ds::tool::add_schedule, ds::tool::add_simulate,
                                              ds::tool::add_report, ds::tool::add_explain,  ds::tool::add_analyze,
                                              ds::tool::add_trace};

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

bool is_command(const CLI::App& app, std::string_view word) {
  const auto commands = app.get_subcommands({});
  return std::any_of(commands.begin(), commands.end(),
                     [&](const CLI::App* command) { return command->get_name() == word; });
}

// Refuses a first word that is no command (null: there is none) and lists the commands.
int refuse(const CLI::App& app, const char* word) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  const std::optional<std::string> meant = word == nullptr ? std::nullopt : ds::near_miss(word, names);
  std::cerr << "ds-tool: expected a command, found "
            << (word == nullptr ? "nothing" : ds::cat('"', ds::shown_text(word), '"'));
  if (meant) std::cerr << "; did you mean " << *meant << '?';
  std::cerr << "\nThe commands (ds-tool COMMAND --help has the flags of each):\n";
  for (const CLI::App* command : app.get_subcommands({})) {
    std::cerr << "  " << command->get_name() << std::string(12 - std::min<size_t>(11, command->get_name().size()), ' ')
              << command->get_description() << '\n';
  }
  return kUsageError;
}

// `ds-tool help COMMAND` is `ds-tool COMMAND --help`.
std::vector<char*> without_help(int argc, char** argv) {
  static char flag[] = "--help";
  std::vector<char*> words(argv, argv + argc);
  if (argc < 2 || std::string_view(argv[1]) != "help") return words;
  words.erase(words.begin() + 1);
  words.resize(std::min<size_t>(words.size(), 2));
  words.push_back(flag);
  return words;
}

int run(std::vector<char*> words) {
  CLI::App app(
      "Looks at ds_config files, pipeline schedules, checkpoints and machines, predicts steps and measures "
      "collectives, without starting a training.",
      "ds-tool");
  app.set_version_flag("--version", DS_VERSION);
  app.require_subcommand(1);
  ds::tool::Command chosen;
  for (const ds::tool::AddCommand add : kCommands) add(app, chosen);
  for (const Program& program : kPrograms) app.add_subcommand(program.command, program.help);  // for the help
  const char* const first = words.size() > 1 ? words[1] : nullptr;
  if (first == nullptr || (first[0] != '-' && !is_command(app, first))) return refuse(app, first);
  words.push_back(nullptr);
  for (const Program& program : kPrograms) {
    if (std::string_view(first) == program.command) become(program, words.data() + 1);
  }
  const int count = static_cast<int>(words.size()) - 1;
  if (const auto code = ds::tool::parse_command_line(app, count, words.data(), std::cout, std::cerr)) return *code;
  ds::require(chosen != nullptr, "expected the command to be the first argument");
  return chosen();
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGCHLD, SIG_DFL);  // what a parent ignores stays ignored: then no child's end could be waited for
  try {
    return run(without_help(argc, argv));
  } catch (const std::exception& error) {
    std::cerr << "ds-tool: " << ds::shown_message(error.what()) << '\n';
    return kUsageError;
  }
}
