#include "tools/report/environment.h"

#include <unistd.h>

#include <algorithm>
#include <array>

#include "core/text.h"

extern char** environ;

namespace ds::tool::report {
namespace {

constexpr std::array<std::string_view, 18> kPrefixes = {"DS_",  "NCCL_", "GLOO_", "CUDA_",   "NVIDIA_",  "OMP_",
                                                        "MKL_", "KMP_",  "GOMP_", "TORCH_",  "PYTORCH_", "ATEN_",
                                                        "C10_", "UCX_",  "FI_",   "MASTER_", "LOCAL_",   "CROSS_"};
constexpr std::array<std::string_view, 12> kNames = {"RANK",
                                                     "WORLD_SIZE",
                                                     "LD_LIBRARY_PATH",
                                                     "LD_PRELOAD",
                                                     "MALLOC_MMAP_THRESHOLD_",
                                                     "GLIBC_TUNABLES",
                                                     "MALLOC_CONF",
                                                     "MALLOC_TRIM_THRESHOLD_",
                                                     "TMPDIR",
                                                     "OPENBLAS_NUM_THREADS",
                                                     "TP_SOCKET_IFNAME",
                                                     "NO_COLOR"};
constexpr std::array<std::string_view, 5> kSecrets = {"TOKEN", "SECRET", "PASSWORD", "API_KEY", "CREDENTIAL"};

}  // namespace

bool changes_behaviour(std::string_view name) {
  return std::find(kNames.begin(), kNames.end(), name) != kNames.end() ||
         std::any_of(kPrefixes.begin(), kPrefixes.end(), [&](std::string_view p) { return name.starts_with(p); });
}

std::vector<std::pair<std::string, std::string>> telling_variables(const std::vector<std::string>& environment) {
  std::vector<std::pair<std::string, std::string>> found;
  for (const std::string& entry : environment) {
    const size_t equal = entry.find('=');
    const std::string name = entry.substr(0, equal);
    if (equal == std::string::npos || !changes_behaviour(name)) continue;
    const bool secret = std::any_of(kSecrets.begin(), kSecrets.end(),
                                    [&](std::string_view word) { return name.find(word) != std::string::npos; });
    found.emplace_back(name, secret ? "(not shown)" : entry.substr(equal + 1));
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::vector<std::string> own_environment() {
  std::vector<std::string> entries;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) entries.emplace_back(*entry);
  return entries;
}

Section describe(const std::vector<std::pair<std::string, std::string>>& variables) {
  Section section("environment");
  nlohmann::ordered_json values = nlohmann::ordered_json::object();
  std::vector<std::string> lines;
  for (const auto& [name, value] : variables) {
    values[name] = value;
    lines.push_back(cat(name, "=", value));
  }
  if (lines.empty()) lines.emplace_back("none that changes what a job does");
  section.add("variables", values, lines);
  return section;
}

}  // namespace ds::tool::report
