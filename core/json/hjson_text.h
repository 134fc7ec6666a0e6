// The characters of an hjson text: a cursor that skips white space and comments and reports errors with line and
// column. Torch-free.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace ds {

inline bool is_hjson_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
// Tells whether a character of HjsonText::peek() ends a line, as the end of the text does.
inline bool is_hjson_line_end(char c) { return c == '\n' || c == '\r' || c == '\0'; }

class HjsonText {
 public:
  // `text` outlives it. Throws ConfigError when that is no UTF-8.
  HjsonText(std::string_view text, std::string name);

  // The character under the cursor; 0 at the end of the text.
  char peek() const { return position_ < text_.size() ? text_[position_] : '\0'; }
  bool at_end() const { return position_ >= text_.size(); }
  void advance(size_t count = 1) { position_ += count; }
  bool starts_with(std::string_view token) const { return text_.substr(position_).starts_with(token); }
  // Throws ConfigError for a comment that is not closed.
  void skip_space_and_comments();

  size_t position() const { return position_; }
  // The text from a position up to the cursor.
  std::string_view since(size_t begin) const { return text_.substr(begin, position_ - begin); }
  // The line of a position, counted from 1.
  int line_of(size_t position) const;
  int line() const { return line_of(position_); }
  // The number of bytes between the beginning of the line and the cursor.
  size_t indent() const;

  // Names what is under the cursor, for a message: "the end of the file", "'}'".
  std::string found() const;
  // Throws ConfigError "NAME:LINE:COLUMN: message".
  [[noreturn]] void fail(size_t position, const std::string& message) const;

 private:
  void check_utf8() const;

  std::string_view text_;
  std::string name_;
  size_t position_ = 0;
  std::vector<size_t> line_starts_;
};

}  // namespace ds
