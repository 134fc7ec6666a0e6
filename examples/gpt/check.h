// Messages of the example, and checks that throw the library's errors with them.
#pragma once

#include <dsengine/errors.h>

#include <sstream>
#include <string>
#include <utility>

namespace gpt {

// Joins anything that has operator<<: cat("rank ", 3, " of ", 4).
template <class... Parts>
std::string cat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return std::move(out).str();
}

// Throws E with the parts of the message joined, when the condition does not hold.
template <class E = ds::UsageError, class... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) throw E(cat(parts...));
}

}  // namespace gpt
