// Reading the kernel's text files (/proc, /sys), below a root that tests choose.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace ds::tool::report {

// The file's text without white space at its end; empty when it cannot be read. Some files of /sys fail when they are
// read (the speed of an interface that is down); that counts as unreadable.
std::string text_of(const std::filesystem::path& path);
// A number at the start of the file.
std::optional<int64_t> number_of(const std::filesystem::path& path);

// What stands behind `name` and ':' or '=' at the start of a line, without the white space and quotes around it; the
// first one. Pure.
std::string field(std::string_view text, std::string_view name);
// The number there: "MemTotal:  24 kB" is 24. Pure.
std::optional<int64_t> number_field(std::string_view text, std::string_view name);
// A number that starts the text. Pure.
std::optional<int64_t> leading_number(std::string_view text);

}  // namespace ds::tool::report
