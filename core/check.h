// Error types and checks. Torch-free.
//
// Two kinds of error: those a caller can act on (ConfigError, CommError, UsageError, NonFiniteError) and a broken
// invariant of ours (InternalError). Every message says what was expected, what was found, where, and what to change.
// The library throws and writes to its log (standard error). It ends the process in one place, where a rank that was told
// to end hangs: docs/process.md has the switch.
#pragma once

#include <source_location>
#include <stdexcept>
#include <string>

#include "core/text.h"

namespace ds {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A ds_config, an option or a file is wrong; the text names the json path, the value, the rule and the fix.
class ConfigError : public Error {
 public:
  using Error::Error;
};

// A peer is missing, late, gone or did something else; the text names the rank and the operation.
class CommError : public Error {
 public:
  using Error::Error;
};

// The API was used in a way it does not offer (calls out of order, wrong tensor); the text names the expected call.
class UsageError : public Error {
 public:
  using Error::Error;
};

// A gradient is infinite or NaN and the update was not done; the text names the step, the first parameter, and the rank
// and micro-batch it came from. The same on every rank.
class NonFiniteError : public Error {
 public:
  using Error::Error;
};

// Reading or writing a file failed; the text names the path and the system's reason.
class IoError : public Error {
 public:
  using Error::Error;
};

// A bug in dsengine.
class InternalError : public Error {
 public:
  using Error::Error;
};

// Throws E with the parts of the message joined, when the condition does not hold.
template <class E = UsageError, class... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) [[unlikely]] {
    throw E(cat(parts...));
  }
}

// Throws InternalError naming the place, when an invariant of ours does not hold.
void ensure(bool condition, const char* invariant, std::source_location where = std::source_location::current());

}  // namespace ds
