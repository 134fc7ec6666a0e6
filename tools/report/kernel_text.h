// Reads the kernel's text files (/proc, /sys), below a root that tests choose.
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
// The number at the start of the file; none where it does not begin with one.
std::optional<int64_t> number_of(const std::filesystem::path& path);

// The text after `name` and ':' or '=' in the first line that begins so, without the white space and quotes around it.
// Pure.
std::string field(std::string_view text, std::string_view name);
// The number in that text: 24 for "MemTotal:  24 kB". Pure.
std::optional<int64_t> number_field(std::string_view text, std::string_view name);
// The number that the text begins with; none where it does not. Pure.
std::optional<int64_t> leading_number(std::string_view text);

}  // namespace ds::tool::report
