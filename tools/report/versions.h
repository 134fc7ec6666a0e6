// The section on versions: of this program, its compiler and libraries, and the system it runs on.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "tools/report/section.h"

namespace ds::tool::report {

// How this program was built.
struct BuildFacts {
  std::string version;   // dsengine's
  std::string revision;  // from git, with "-dirty" where files differed; empty when the sources were no git tree
  std::string compiler;  // "GNU 12.2.0"
  std::string type;      // "Release"
  std::string cuda;      // "CUDA 13.0.88, NCCL 2.28.9" when libdsengine_cuda was built beside it, else empty
};
BuildFacts build_facts();

// "Debian GNU/Linux 12 (bookworm)" from the text of /etc/os-release; empty when it does not say. Pure.
std::string distribution(std::string_view os_release);
// "13.0.88" from what `nvcc --version` prints; empty when it is none of that. Pure.
std::string toolkit_version(std::string_view nvcc_output);

// `libraries`: what ds-tool-libraries said (see libraries.h).
Section describe_versions(const nlohmann::ordered_json& libraries, const std::filesystem::path& root = "/");

}  // namespace ds::tool::report
