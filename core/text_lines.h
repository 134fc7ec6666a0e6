// Texts of several lines, as ranks send each other lists of names. Torch-free.
#pragma once

#include <sstream>
#include <string>
#include <vector>

#include "core/text.h"

namespace ds {

// Returns the lines of a text without their ends; the end of the last one may be missing.
inline std::vector<std::string> text_lines(const std::string& text) {
  std::vector<std::string> lines;
  auto in = classic_stream<std::istringstream>(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

}  // namespace ds
