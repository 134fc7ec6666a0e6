// Building text from parts. Torch-free.
#pragma once

#include <sstream>
#include <string>
#include <utility>

namespace ds {

// Joins anything that has operator<<: cat("rank ", 3, " of ", 4).
template <class... Parts>
std::string cat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return std::move(out).str();
}

}  // namespace ds
