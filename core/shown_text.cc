#include "core/shown_text.h"

#include <algorithm>

#include "core/text.h"
#include "core/utf8.h"

namespace ds {
namespace {

constexpr std::string_view kCut = "...";

// U+0080 to U+009F: terminals obey them as they do the control characters of ASCII.
bool is_control(std::string_view character) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(character[i]); };
  if (character.size() == 1) return byte(0) < 0x20 || byte(0) == 0x7F;
  return character.size() == 2 && byte(0) == 0xC2 && byte(1) < 0xA0;
}

void append_escaped(std::string& out, std::string_view bytes) {
  static constexpr std::string_view kDigits = "0123456789ABCDEF";
  for (const char c : bytes) {
    if (c == '\n' || c == '\t') {
      out += c == '\n' ? "\\n" : "\\t";
      continue;
    }
    const auto byte = static_cast<unsigned char>(c);
    out += "\\x";
    out += kDigits[byte >> 4U];
    out += kDigits[byte & 0xFU];
  }
}

// The number of printable characters of ASCII that the text begins with.
size_t plain_length(std::string_view text) {
  const auto* const end = std::find_if(text.begin(), text.end(), [](char c) { return c < 0x20 || c >= 0x7F; });
  return static_cast<size_t>(end - text.begin());
}

// A cut falls between characters and leaves room for what says that there is one.
std::string shown_line(std::string_view text, size_t most, bool tabs_stay) {
  const size_t kept = text.size() <= most ? text.size() : most - std::min(most, kCut.size());
  std::string out;
  out.reserve(std::min(text.size(), most));
  for (size_t i = 0; i < kept;) {
    if (const size_t plain = plain_length(text.substr(i, kept - i)); plain > 0) {
      out += text.substr(i, plain);
      i += plain;
      continue;
    }
    const size_t length = utf8_length(text.substr(i));
    const std::string_view character = text.substr(i, std::max<size_t>(1, length));
    if (i + character.size() > kept) break;
    const bool plain = length > 0 && !is_control(character);
    if (plain || (tabs_stay && character == "\t")) {
      out += character;
    } else {
      append_escaped(out, character);
    }
    i += character.size();
  }
  if (kept < text.size()) out += kCut;
  return out;
}

}  // namespace

std::string shown_text(std::string_view text, size_t most) { return shown_line(text, most, false); }

std::string shown_message(std::string_view message) {
  std::string out;
  while (!message.empty()) {
    const size_t end = std::min(message.find('\n'), message.size());
    if (out.size() > kShownMessageBytes) return out + cat("... (", message.size(), " bytes more)");
    out += shown_line(message.substr(0, end), kShownLineBytes, true);
    if (end < message.size()) out += '\n';
    message.remove_prefix(std::min(end + 1, message.size()));
  }
  return out;
}

}  // namespace ds
