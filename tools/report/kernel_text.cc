#include "tools/report/kernel_text.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>
#include <utility>

#include "core/text.h"

namespace ds::tool::report {
namespace {

constexpr std::string_view kBlank = " \t\r\n";

std::string_view trimmed(std::string_view text, std::string_view what) {
  const size_t first = text.find_first_not_of(what);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(what) - first + 1);
}

}  // namespace

std::string text_of(const std::filesystem::path& path) {
  auto file = classic_stream<std::ifstream>(path, std::ios::binary);
  auto read = classic_stream<std::ostringstream>();
  read << file.rdbuf();  // catches what the buffer throws when the kernel refuses
  std::string text = std::move(read).str();
  text.resize(text.find_last_not_of(kBlank) + 1);  // npos + 1 is 0
  return text;
}

std::optional<int64_t> leading_number(std::string_view text) {
  text = trimmed(text, kBlank);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;
  return value;
}

std::optional<int64_t> number_of(const std::filesystem::path& path) { return leading_number(text_of(path)); }

std::string field(std::string_view text, std::string_view name) {
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (!line.starts_with(name)) continue;
    const std::string_view rest = trimmed(line.substr(name.size()), kBlank);
    if (rest.empty() || (rest.front() != ':' && rest.front() != '=')) continue;
    return std::string(trimmed(trimmed(rest.substr(1), kBlank), "\""));
  }
  return {};
}

std::optional<int64_t> number_field(std::string_view text, std::string_view name) {
  return leading_number(field(text, name));
}

}  // namespace ds::tool::report
