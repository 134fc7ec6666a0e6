#include "tools/report/libraries.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <string>
#include <vector>

#include "core/json/parse_json.h"
#include "core/text.h"
#include "offload/host_budget.h"
#include "tools/report/child_process.h"

namespace ds::tool::report {
namespace {

using nlohmann::ordered_json;

constexpr auto kLimit = std::chrono::seconds(30);  // LibTorch with CUDA, from a cold network file system

ordered_json ask(const std::vector<std::string>& words, const std::string& name) {
  const Finished asked = run_child(words, kLimit);
  if (!asked.fine) {
    const std::string why = last_line(asked.err);
    return {{"error", cat(name, ": ", asked.ending, why.empty() ? "" : cat(": ", why))}};
  }
  auto answer = parse_json<ordered_json>(asked.out, nullptr, false);
  if (!answer.is_object()) return {{"error", cat(name, ": expected JSON, it printed ", asked.out.substr(0, 80))}};
  return answer;
}

std::string device_line(const ordered_json& device) {
  std::string text = cat(device.value("index", 0), ": ", device.value("name", "without a name"));
  if (device.contains("bytes")) {
    text += cat(", ", offload::size_text(device["bytes"].get<int64_t>()), ", ",
                offload::size_text(device["free"].get<int64_t>()), " free");
  }
  if (!device.contains("peers")) return text;
  for (const auto& [peer, way] : device["peers"].items()) text += cat("; to ", peer, ": ", way.get<std::string>());
  return text;
}

void add_gpus(Section& section, const ordered_json& devices, int gpu_files) {
  if (devices.contains("error")) {
    const std::string error = devices["error"];
    return section.add("gpus", ordered_json::array(),
                       cat("none: no NVIDIA driver answers (", error, "); ", gpu_files, " /dev/nvidia* files"));
  }
  std::vector<std::string> lines;
  for (const ordered_json& device : devices["devices"]) lines.push_back(device_line(device));
  if (lines.empty()) lines.emplace_back("none: the driver knows no GPU");
  section.add("gpus", devices["devices"], lines);
}

using nlohmann::ordered_json;

// The part of NVIDIA's nvml.h that is used; NVIDIA keeps these functions and numbers for old programs.
using Device = void*;
using Result = int;  // 0: success
struct MemoryInfo {
  unsigned long long total, free, used;
};
constexpr unsigned kNvLinkPeers = 2;  // NVML_P2P_CAPS_INDEX_NVLINK
constexpr unsigned kPeersFine = 0;    // NVML_P2P_STATUS_OK

struct Ancestor {
  int level;  // nvmlGpuTopologyLevel_t
  const char* text;
};
constexpr std::array kAncestors = {Ancestor{0, "same board"},
                                   Ancestor{10, "PCIe, same switch"},
                                   Ancestor{20, "PCIe, several switches"},
                                   Ancestor{30, "PCIe, same host bridge"},
                                   Ancestor{40, "PCIe, same NUMA node"},
                                   Ancestor{50, "PCIe, other NUMA node"}};

class Library {
 public:
  explicit Library(const std::filesystem::path& path) : handle_(::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) error_ = ::dlerror();
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;
  ~Library() {
    if (handle_ == nullptr) return;
    if (shut_down_) call("nvmlShutdown");
    ::dlclose(handle_);
  }

  // Empty when it is ready.
  std::string start() {
    if (handle_ == nullptr) return error_;
    const Result result = call("nvmlInit_v2");
    shut_down_ = result == 0;
    return result == 0 ? "" : cat("nvmlInit: ", text_of_error(result));
  }

  // -1 when the library lacks the function.
  template <class... Arguments>
  Result call(const char* name, Arguments... arguments) const {
    const auto function = reinterpret_cast<Result (*)(Arguments...)>(::dlsym(handle_, name));
    return function == nullptr ? -1 : function(arguments...);
  }

  std::string text_of_error(Result result) const {
    using ErrorString = const char* (*)(Result);
    const auto function = reinterpret_cast<ErrorString>(::dlsym(handle_, "nvmlErrorString"));
    return function == nullptr || result < 0 ? cat("error ", result) : function(result);
  }

 private:
  void* handle_;
  std::string error_;
  bool shut_down_ = false;
};

ordered_json peers_of(const Library& nvml, const std::vector<Device>& devices, size_t own) {
  ordered_json peers = ordered_json::object();
  for (size_t other = 0; other < devices.size(); ++other) {
    if (other == own) continue;
    unsigned status = ~0U;
    if (nvml.call("nvmlDeviceGetP2PStatus", devices[own], devices[other], kNvLinkPeers, &status) == 0 &&
        status == kPeersFine) {
      peers[cat(other)] = "NVLink";
      continue;
    }
    int level = -1;
    if (nvml.call("nvmlDeviceGetTopologyCommonAncestor", devices[own], devices[other], &level) != 0) continue;
    for (const Ancestor& ancestor : kAncestors) {
      if (ancestor.level == level) peers[cat(other)] = ancestor.text;
    }
  }
  return peers;
}

ordered_json describe_device(const Library& nvml, const std::vector<Device>& devices, size_t index) {
  std::array<char, 128> name{};
  MemoryInfo memory{};
  ordered_json device = {{"index", index}};
  if (nvml.call("nvmlDeviceGetName", devices[index], name.data(), static_cast<unsigned>(name.size())) == 0) {
    device["name"] = name.data();
  }
  if (nvml.call("nvmlDeviceGetMemoryInfo", devices[index], &memory) == 0) {
    device["bytes"] = memory.total;
    device["free"] = memory.free;
  }
  device["peers"] = peers_of(nvml, devices, index);
  return device;
}

}  // namespace

ordered_json ask_libraries(const std::filesystem::path& folder) {
  return ask({(folder / "ds-tool-libraries").string()}, "ds-tool-libraries");
}

ordered_json ask_devices(const std::filesystem::path& program, const std::vector<std::string>& words) {
  std::vector<std::string> command = {program.string()};
  command.insert(command.end(), words.begin(), words.end());
  return ask(command, "the driver");
}

Section describe_devices(const ordered_json& devices, const ordered_json& libraries, int gpu_files) {
  Section section("devices");
  add_gpus(section, devices, gpu_files);
  const std::string driver = devices.value("driver", "");
  section.add("driver", {{"version", driver}, {"cuda", devices.value("cuda", "")}, {"files", gpu_files}},
              driver.empty() ? "none" : cat(driver, ", for CUDA up to ", devices.value("cuda", "unknown")));
  if (!libraries.contains("cuda")) {
    section.add("libdsengine_cuda", nullptr, cat("not asked: ", libraries.value("error", "no answer")));
    return section;
  }
  const ordered_json& cuda = libraries["cuda"];
  const bool loads = cuda.value("loads", false);
  section.add(
      "libdsengine_cuda", cuda,
      loads ? cat("loads; usable GPUs: ", cuda.value("usable_devices", 0), "; NCCL ", cuda.value("nccl", "unknown"))
            : cuda.value("refusal", ""));
  return section;
}

Section describe_backends(const ordered_json& libraries) {
  Section section("backends");
  for (const char* name : {"gloo", "shm", "nccl"}) {
    if (!libraries.contains("backends")) {
      section.add(name, nullptr, cat("not asked: ", libraries.value("error", "no answer")));
      continue;
    }
    const ordered_json backend = libraries["backends"].value(name, ordered_json::object());
    const std::string refusal = backend.value("refusal", "");
    const bool told = refusal == libraries["cuda"].value("refusal", "");  // by describe_devices
    section.add(name, backend,
                backend.value("works", false) ? "works"
                : told                        ? "no: libdsengine_cuda cannot be loaded, see above"
                                              : cat("no: ", refusal));
  }
  return section;
}

ordered_json ask_nvml(const std::filesystem::path& library) {
  Library nvml(library);
  if (const std::string error = nvml.start(); !error.empty()) return {{"error", error}};
  ordered_json answer = ordered_json::object();
  std::array<char, 80> driver{};
  if (nvml.call("nvmlSystemGetDriverVersion", driver.data(), static_cast<unsigned>(driver.size())) == 0) {
    answer["driver"] = driver.data();
  }
  int cuda = 0;
  if (nvml.call("nvmlSystemGetCudaDriverVersion_v2", &cuda) == 0)
    answer["cuda"] = cat(cuda / 1000, ".", cuda % 1000 / 10);
  unsigned count = 0;
  const Result counted = nvml.call("nvmlDeviceGetCount_v2", &count);
  if (counted != 0) return {{"error", cat("nvmlDeviceGetCount: ", nvml.text_of_error(counted))}};
  std::vector<Device> devices;
  for (unsigned index = 0; index < count; ++index) {
    Device device = nullptr;
    const Result found = nvml.call("nvmlDeviceGetHandleByIndex_v2", index, &device);
    if (found != 0) return {{"error", cat("GPU ", index, ": ", nvml.text_of_error(found))}};
    devices.push_back(device);
  }
  answer["devices"] = ordered_json::array();
  for (size_t index = 0; index < devices.size(); ++index) {
    answer["devices"].push_back(describe_device(nvml, devices, index));
  }
  return answer;
}

}  // namespace ds::tool::report
