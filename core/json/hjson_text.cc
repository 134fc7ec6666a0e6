#include "core/json/hjson_text.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/shown_text.h"
#include "core/utf8.h"

namespace ds {

HjsonText::HjsonText(std::string_view text, std::string name)
    : text_(without_byte_order_mark(text)), name_(std::move(name)) {
  line_starts_.push_back(0);
  for (size_t i = 0; i < text_.size(); ++i) {
    if (text_[i] == '\n') line_starts_.push_back(i + 1);
  }
  check_utf8();
}

void HjsonText::check_utf8() const {
  for (size_t i = 0; i < text_.size();) {
    const size_t length = utf8_length(text_.substr(i));
    if (length == 0 || text_[i] == '\0') fail(i, "expected UTF-8 text, found another byte; save the file as UTF-8");
    i += length;
  }
}

int HjsonText::line_of(size_t position) const {
  return static_cast<int>(std::upper_bound(line_starts_.begin(), line_starts_.end(), position) - line_starts_.begin());
}

size_t HjsonText::indent() const { return position_ - line_starts_[static_cast<size_t>(line() - 1)]; }

void HjsonText::fail(size_t position, const std::string& message) const {
  const int line = line_of(position);
  const size_t start = line_starts_[static_cast<size_t>(line - 1)];
  const std::string_view before = text_.substr(start, std::min(position, text_.size()) - start);
  // Columns count characters, not bytes.
  const auto column = 1 + std::count_if(before.begin(), before.end(), [](char c) { return (c & 0xC0) != 0x80; });
  throw ConfigError(cat(name_, ":", line, ":", column, ": ", message));
}

std::string HjsonText::found() const {
  if (at_end()) return "the end of the file";
  if (peek() == '\n' || peek() == '\r') return "the end of the line";
  return cat("'", shown_text(text_.substr(position_, std::max<size_t>(1, utf8_length(text_.substr(position_))))), "'");
}

void HjsonText::skip_space_and_comments() {
  while (!at_end()) {
    if (is_hjson_space(peek())) {
      advance();
    } else if (peek() == '#' || starts_with("//")) {
      while (!is_hjson_line_end(peek())) advance();
    } else if (starts_with("/*")) {
      const size_t end = text_.find("*/", position_ + 2);
      if (end == std::string_view::npos) fail(position_, "expected '*/' to close the comment that begins here");
      position_ = end + 2;
    } else {
      return;
    }
  }
}

}  // namespace ds
