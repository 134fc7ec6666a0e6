#include "tools/report/libraries.h"

#include <algorithm>
#include <chrono>

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
  ordered_json answer = ordered_json::parse(asked.out, nullptr, false);
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

}  // namespace ds::tool::report
