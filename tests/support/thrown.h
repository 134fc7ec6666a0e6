// The message of an exception, for tests of errors.
#pragma once

#include <exception>
#include <string>

namespace ds::test {

// Calls `action` and returns the text of the `E` that it throws; `otherwise` when it throws nothing. Exceptions of
// other types pass through.
template <class E = std::exception, class Action>
std::string thrown_by(const Action& action, const std::string& otherwise = "no error") {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  }
  return otherwise;
}

}  // namespace ds::test
