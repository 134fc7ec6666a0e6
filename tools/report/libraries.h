// Asks LibTorch, the CUDA parts and the NVIDIA driver about themselves. Child processes ask, because each of them may
// be broken, crash or hang, and the rest of the report shall not.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/report/section.h"

namespace ds::tool::report {

// The JSON that ds-tool-libraries prints, a program in `folder` (see libraries_main.cc), or {"error": why not}.
nlohmann::ordered_json ask_libraries(const std::filesystem::path& folder);
// The answer of ask_nvml() from a child that runs this program with `words`, or {"error": why not}.
nlohmann::ordered_json ask_devices(const std::filesystem::path& program, const std::vector<std::string>& words);

// `gpu_files`: /dev/nvidia0, ... that are there.
Section describe_devices(const nlohmann::ordered_json& devices, const nlohmann::ordered_json& libraries, int gpu_files);
Section describe_backends(const nlohmann::ordered_json& libraries);

// GPUs as the NVIDIA driver describes them, through its management library (NVML), opened at run time: that needs no
// CUDA toolkit, makes no context on a GPU and takes none of its memory. Returns {"driver": "580.65", "cuda": "13.0",
// "devices": [{"index", "name", "bytes", "free", "peers": {"1": "NVLink"}}]}, or
// {"error": why not}. Peers by the nearest way: "NVLink", "PCIe, same switch", ...; what the driver does not tell is
// left out. The library is asked in this process: a driver that hangs, hangs it (ds-tool report runs it as a child).
nlohmann::ordered_json ask_nvml(const std::filesystem::path& library = "libnvidia-ml.so.1");

}  // namespace ds::tool::report
