// Reads what an hjson text has between its brackets, braces and commas: keys, strings, numbers, true, false and null.
// Torch-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "core/json/hjson_text.h"

namespace ds {

// Each method reads from the cursor of `text` on and leaves it after what was read; throws ConfigError through
// HjsonText::fail() when it cannot.
class HjsonScalars {
 public:
  // `text` outlives it.
  explicit HjsonScalars(HjsonText& text) : text_(text) {}

  // Reads a key, with or without quotes, and leaves the cursor before the colon.
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

 private:
  void append_escape(std::string& out);
  uint32_t read_hex4(size_t escape);
  void skip_indent(size_t columns);
  void refuse_typographic_quote() const;
  void refuse_no_json(size_t begin, std::string_view word) const;
  void refuse_missing_comma(size_t begin, std::string_view word) const;

  HjsonText& text_;
  std::string_view swallowing_;  // the last string without quotes that has a brace or bracket
  int swallowing_line_ = 0;
};

}  // namespace ds
