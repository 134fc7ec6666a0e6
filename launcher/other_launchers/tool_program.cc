#include "launcher/other_launchers/tool_program.h"

#include <array>
#include <cstdio>
#include <memory>

#include "core/check.h"
#include "launcher/command_line/shell_words.h"
#include "launcher/program/program_path.h"
#include "launcher/program/rank_environment.h"

namespace ds::launcher {
namespace {

struct ToolProgram {
  const char* what;
  std::vector<std::string> names;
  const char* install;
};

ToolProgram program_of(Launcher launcher) {
  switch (launcher) {
    case Launcher::kPdsh:
      return {"pdsh", {"pdsh"}, "Debian: pdsh"};
    case Launcher::kOpenMpi:
      return {"the mpirun of Open MPI", {"mpirun", "mpirun.openmpi"}, "Debian: openmpi-bin"};
    case Launcher::kMpich:
      return {"the mpirun of MPICH", {"mpirun", "mpirun.mpich", "mpiexec.hydra"}, "Debian: mpich"};
    case Launcher::kIntelMpi:
      return {"the mpirun of Intel MPI", {"mpirun", "mpiexec.hydra"}, "Intel oneAPI; source its vars.sh"};
    case Launcher::kSlurm:
      return {"srun of SLURM", {"srun"}, "Debian: slurm-client"};
    case Launcher::kSsh:
      break;
  }
  return {"ssh", {"ssh"}, "Debian: openssh-client"};
}

std::string version_text(const std::string& file) {
  // NOLINTNEXTLINE(bugprone-command-processor): the name is one word of the shell, whatever is in it
  const std::unique_ptr<FILE, int (*)(FILE*)> out(popen((shell_word(file) + " --version 2>&1").c_str(), "r"), pclose);
  std::array<char, 4096> bytes{};
  return out ? std::string(bytes.data(), fread(bytes.data(), 1, bytes.size(), out.get())) : "";
}

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

}  // namespace

bool is_version_of(Launcher launcher, const std::string& text) {
  switch (launcher) {
    case Launcher::kOpenMpi:
      return contains(text, "Open MPI") || contains(text, "OpenRTE");
    case Launcher::kMpich:
      return contains(text, "HYDRA");
    case Launcher::kIntelMpi:
      return contains(text, "Intel");
    default:
      return true;
  }
}

std::string find_tool(Launcher launcher, const std::vector<std::string>& environment) {
  const ToolProgram program = program_of(launcher);
  const std::string path = search_path(environment);
  const bool asks_version = program.names.size() > 1;
  std::string others;  // that are of another MPI
  for (const std::string& name : program.names) {
    try {
      const std::string file = find_program(name, path);
      if (!asks_version || is_version_of(launcher, version_text(file))) return file;
      others += cat(others.empty() ? "" : ", ", file);
    } catch (const ProgramError&) {  // the next name
    }
  }
  throw UsageError(cat("--launcher ", name_of(launcher), " needs ", program.what, ", which is not in PATH",
                       others.empty() ? "" : cat(" (", others, " is of another MPI)"), ": install it (",
                       program.install, ")"));
}

}  // namespace ds::launcher
