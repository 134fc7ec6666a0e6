// How often a text has a part, for tests of logs and output.
#pragma once

#include <cstddef>
#include <string>

namespace ds::test {

// Returns at how many places of `text` the part begins; places may overlap.
inline size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

}  // namespace ds::test
