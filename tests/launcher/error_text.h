// What an error says.
#pragma once

#include <string>

#include "core/check.h"

namespace ds::launcher::testing {

// The text of the ds::Error that `action` throws; "no error" when it throws none.
template <class Action>
std::string error_text(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace ds::launcher::testing
