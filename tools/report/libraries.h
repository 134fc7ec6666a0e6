// What LibTorch, the CUDA parts and the driver say of themselves, asked by child processes: any of them may be broken,
// crash or hang, and the rest of the report shall not.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/report/section.h"

namespace ds::tool::report {

// JSON that ds-tool-libraries printed, which lies in `folder` (see libraries_main.cc), or {"error": why not}.
nlohmann::ordered_json ask_libraries(const std::filesystem::path& folder);
// As ask_nvml(), by a child that runs this program with `words`.
nlohmann::ordered_json ask_devices(const std::filesystem::path& program, const std::vector<std::string>& words);

// `gpu_files`: /dev/nvidia0, ... that are there.
Section describe_devices(const nlohmann::ordered_json& devices, const nlohmann::ordered_json& libraries, int gpu_files);
Section describe_backends(const nlohmann::ordered_json& libraries);

}  // namespace ds::tool::report
