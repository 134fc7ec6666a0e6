// What a command of ds-tool leaves: its exit code and what it printed.
#pragma once

#include <sstream>
#include <string>

namespace ds::tool {

struct Outcome {
  int code;
  std::string out, err;
};

// `command` takes the two streams and returns the exit code.
template <class Command>
Outcome outcome_of(const Command& command) {
  std::ostringstream out;
  std::ostringstream err;
  const int code = command(out, err);
  return {code, out.str(), err.str()};
}

}  // namespace ds::tool
