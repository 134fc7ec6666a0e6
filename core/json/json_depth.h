// A limit for JSON from elsewhere: nlohmann's parser takes any depth, but its dump() and copies recurse, so that a text
// of millions of brackets would overflow the stack.
//
// The text is looked at before it is parsed. A callback of the parser could count as well, but is slow (parse_json.h).
#pragma once

#include <string>
#include <string_view>

#include "core/json/parse_json.h"

namespace ds {

inline constexpr int kDeepestJson = 100;

// Whether the text has more than kDeepestJson objects and arrays in one another.
inline bool is_deep_json(std::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      in_string = c != '"';
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      if (++depth > kDeepestJson) return true;
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return false;
}

// Returns the value of a text; a discarded one where the text is no JSON, or too deep.
template <class Json>
Json parse_shallow_json(const std::string& text) {
  if (is_deep_json(text)) return Json(Json::value_t::discarded);
  return parse_json<Json>(text, nullptr, /*allow_exceptions=*/false);
}

}  // namespace ds
