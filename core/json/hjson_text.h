// The characters of an hjson text: a cursor that skips white space and comments, reads strings and quoteless values,
// and reports errors with line and column. Torch-free.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace ds {

// `text` outlives it. Every method that reads throws ConfigError "NAME:LINE:COLUMN: ..." when it cannot.
class HjsonText {
 public:
  HjsonText(std::string_view text, std::string name);

  // The character under the cursor or `ahead` of it; 0 at the end of the text.
  char peek(size_t ahead = 0) const { return position_ + ahead < text_.size() ? text_[position_ + ahead] : '\0'; }
  bool at_end() const { return position_ >= text_.size(); }
  void advance() { ++position_; }
  bool starts_with(std::string_view token) const { return text_.substr(position_).starts_with(token); }
  void skip_space_and_comments();

  size_t position() const { return position_; }
  int line_of(size_t position) const;
  int line() const { return line_of(position_); }

  // Reads a key, from its first character on; leaves the cursor after it, before the colon.
  std::string read_key();
  // Reads a string in quotes, from ' or " on.
  std::string read_quoted();
  // Reads a multi-line string, from ''' on.
  std::string read_multiline();
  // Reads true, false, null, a number, or a string up to the end of the line. Fails by name for what is meant for JSON
  // and is none, NaN or a missing comma.
  nlohmann::ordered_json read_quoteless();

  // Says which string without quotes took what closes an object or list with it, and what to do; empty: none did.
  std::string swallowed() const;

  // "end of file", "'}'", ...
  std::string found() const;
  [[noreturn]] void fail(size_t position, const std::string& message) const;

 private:
  void check_utf8() const;
  void append_escape(std::string& out);
  uint32_t read_hex4(size_t escape);
  void skip_indent(size_t columns);
  void refuse_no_json(size_t begin, std::string_view word) const;
  void refuse_missing_comma(size_t begin, std::string_view word) const;

  std::string_view text_;
  std::string name_;
  size_t position_ = 0;
  std::string_view swallowing_;  // the last string without quotes that has a brace or bracket
  std::vector<size_t> line_starts_;
};

}  // namespace ds
