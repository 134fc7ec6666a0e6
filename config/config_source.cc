#include "config/config_source.h"

#include <filesystem>
#include <optional>
#include <string_view>
#include <utility>

#include "core/check.h"
#include "core/files/regular_file.h"
#include "core/shown_text.h"
#include "core/utf8.h"

namespace ds::engine::config {
namespace {

constexpr size_t kShownCharacters = 60;
constexpr size_t kMostConfigBytes = 16 << 20;

// Url-safe base64 (RFC 4648, section 5), padding optional; nothing for other text.
std::optional<std::string> decode_base64(std::string_view text) {
  while (text.ends_with('=')) text.remove_suffix(1);
  if (text.empty() || text.size() % 4 == 1) return std::nullopt;
  static constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  std::string out;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    const size_t value = kAlphabet.find(c == '+' ? '-' : c == '/' ? '_' : c);
    if (value == std::string_view::npos) return std::nullopt;
    bits = bits << 6 | static_cast<uint32_t>(value);
    count += 6;
    if (count >= 8) {
      count -= 8;
      out += static_cast<char>(bits >> count & 0xFF);
    }
  }
  return out;
}

// The beginning of base64 text of an object; a mistyped file name seldom decodes to it.
bool looks_like_object(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  return first != std::string::npos && text[first] == '{';
}

std::string read_file(const std::string& path) {
  FileText file = read_regular_file(path, kMostConfigBytes);
  require<ConfigError>(file.trouble.empty(), "ds_config ", shown_text(path), ": ", file.trouble);
  const std::string_view text = without_byte_order_mark(file.text);
  require<ConfigError>(text.find_first_not_of(" \t\r\n") != std::string_view::npos, "ds_config ", shown_text(path),
                       ": the file is empty; expected a JSON object, at least {\"train_micro_batch_size_per_gpu\": N}");
  return std::move(file.text);
}

}  // namespace

std::string ConfigSource::name() const {
  if (is_object_) return "JSON object";
  if (text_.empty()) return "no config";
  std::error_code error;
  if (file_only_ || std::filesystem::exists(text_, error)) return text_;
  return decode_base64(text_) ? "base64 text" : shown_text(text_, kShownCharacters);
}

HjsonDocument ConfigReader::read(const ConfigSource& source) {
  const std::string& text = source.text_;
  if (source.is_object_) return {source.object_, {}, {}};
  require<ConfigError>(!text.empty(), "no ds_config: expected a path, a JSON object or base64 text");
  std::error_code error;
  if (std::filesystem::exists(text, error)) {
    return parse_hjson(read_file(text), text);
  }
  const auto decoded = source.file_only_ ? std::nullopt : decode_base64(text);
  require<ConfigError>(decoded && looks_like_object(*decoded), "ds_config \"", shown_text(text, kShownCharacters),
                       "\": no such file", source.file_only_ ? "" : ", and not url-safe base64 of a JSON object either",
                       "; check the path");
  return parse_hjson(*decoded, "base64 text");
}

}  // namespace ds::engine::config
