// GPUs as the NVIDIA driver describes them, through its management library, opened at run time: it needs no CUDA
// toolkit, makes no context on a GPU and takes none of its memory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

namespace ds::tool::report {

// {"driver": "580.65", "cuda": "13.0", "devices": [{"index", "name", "bytes", "free", "peers": {"1": "NVLink"}}]}, or
// {"error": why not}. Peers by the nearest way: "NVLink", "PCIe, same switch", ...; what the driver does not tell is
// left out. The library is asked in this process: a driver that hangs, hangs it (ds-tool report runs it as a child).
nlohmann::ordered_json ask_nvml(const std::filesystem::path& library = "libnvidia-ml.so.1");

}  // namespace ds::tool::report
