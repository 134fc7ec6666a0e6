// Building text from parts. Torch-free.
#pragma once

#include <iomanip>
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

// A number with so many digits after the point: fixed(2.5, 2) is "2.50".
inline std::string fixed(double value, int digits) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(digits) << value;
  return std::move(out).str();
}

}  // namespace ds
