// What was built, with what, and what it runs on.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "tools/report/section.h"

namespace ds::tool::report {

// "Debian GNU/Linux 12 (bookworm)" from the text of /etc/os-release; empty when it does not say. Pure.
std::string distribution(std::string_view os_release);
// "13.0.88" from what `nvcc --version` prints; empty when it is none of that. Pure.
std::string toolkit_version(std::string_view nvcc_output);

// `libraries`: what ds-tool-libraries said (see libraries.h).
Section describe_versions(const nlohmann::ordered_json& libraries, const std::filesystem::path& root = "/");

}  // namespace ds::tool::report
