#include "tools/report/versions.h"

#include <gnu/libc-version.h>
#include <sys/utsname.h>

#include <chrono>
#include <cstdlib>
#include <sstream>

#include "core/text.h"
#include "tools/report/child_process.h"
#include "tools/report/kernel_text.h"

namespace ds::tool::report {
namespace {

namespace fs = std::filesystem;

constexpr auto kCompilerLimit = std::chrono::seconds(5);

// Finds nvcc as the shell does, else where the toolkit's own installer puts it; empty: none.
fs::path find_nvcc() {
  std::error_code ignored;
  const char* path = std::getenv("PATH");
  auto folders = classic_stream<std::istringstream>(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    if (fs::exists(fs::path(folder) / "nvcc", ignored)) return fs::path(folder) / "nvcc";
  }
  const fs::path usual = "/usr/local/cuda/bin/nvcc";
  return fs::exists(usual, ignored) ? usual : fs::path();
}

void add_toolkit(Section& section) {
  const fs::path nvcc = find_nvcc();
  if (nvcc.empty()) return section.add("cuda_toolkit", nullptr, "none: no nvcc on PATH or in /usr/local/cuda/bin");
  const Finished asked = run_child({nvcc.string(), "--version"}, kCompilerLimit);
  const std::string version = toolkit_version(asked.out);
  if (version.empty()) {
    return section.add("cuda_toolkit", nullptr,
                       cat("unknown: ", nvcc.string(), " --version: ", asked.fine ? "no version in it" : asked.ending));
  }
  section.add("cuda_toolkit", {{"version", version}, {"nvcc", nvcc.string()}}, cat(version, " (", nvcc.string(), ")"));
}

void add_libtorch(Section& section, const nlohmann::ordered_json& libraries) {
  if (!libraries.contains("libtorch")) {
    return section.add("libtorch", nullptr, cat("not asked: ", libraries.value("error", "no answer")));
  }
  const auto& torch = libraries["libtorch"];
  section.add("libtorch", torch,
              cat(torch.value("version", ""), ", ", torch.value("cpu_capability", ""), ", ", torch.value("threads", 0),
                  " threads (", torch.value("file", ""), ")"));
}

}  // namespace

std::string distribution(std::string_view os_release) { return field(os_release, "PRETTY_NAME"); }

std::string toolkit_version(std::string_view nvcc_output) {
  constexpr std::string_view kMark = ", V";
  const size_t begin = nvcc_output.find(kMark);
  if (begin == std::string_view::npos) return {};
  const std::string_view rest = nvcc_output.substr(begin + kMark.size());
  return std::string(rest.substr(0, rest.find_first_not_of("0123456789.")));
}

Section describe_versions(const nlohmann::ordered_json& libraries, const fs::path& root) {
  Section section("versions");
  const BuildFacts build = build_facts();
  section.add("dsengine", {{"version", build.version}, {"revision", build.revision}},
              cat(build.version, ", ", build.revision.empty() ? "not built from git" : cat("git ", build.revision)));
  section.add("built_with", {{"compiler", build.compiler}, {"type", build.type}, {"cuda", build.cuda}},
              cat(build.compiler, ", ", build.type,
                  build.cuda.empty() ? "; without CUDA parts" : cat("; CUDA parts with ", build.cuda)));
  add_libtorch(section, libraries);
  add_toolkit(section);
  utsname kernel{};
  ::uname(&kernel);
  section.add("kernel", {{"release", kernel.release}, {"machine", kernel.machine}},
              cat(kernel.sysname, " ", kernel.release, " ", kernel.machine));
  section.add_text("distribution", distribution(text_of(root / "etc/os-release")));
  section.add_text("glibc", ::gnu_get_libc_version());
  return section;
}

}  // namespace ds::tool::report
