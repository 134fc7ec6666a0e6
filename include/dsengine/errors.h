// The exceptions that the library throws. Torch-free.
//
// Two kinds of error: those a caller can act on (ConfigError, CommError, UsageError, NonFiniteError, IoError) and a
// broken invariant of ours (InternalError). Every message says what was expected, what was found, where, and what to
// change. Errors own their text; they may be copied and thrown on from any thread.
#pragma once

#include <stdexcept>

namespace ds {

// The base of all errors.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Says that a ds_config, an option or a file is wrong; the text names the json path, the value, the rule and the fix.
class ConfigError : public Error {
 public:
  using Error::Error;
};

// Says that a peer is missing, late, gone or did something else; the text names the rank and the operation.
class CommError : public Error {
 public:
  using Error::Error;
};

// Says that the API was used wrongly (calls out of order, a wrong tensor); the text names the expected call.
class UsageError : public Error {
 public:
  using Error::Error;
};

// Says that a gradient is infinite or NaN and the update was not done; the text names the step, the first parameter,
// and the rank and micro-batch it came from. Every rank throws it with the same text.
class NonFiniteError : public Error {
 public:
  using Error::Error;
};

// Says that reading or writing a file failed; the text names the path and the system's reason.
class IoError : public Error {
 public:
  using Error::Error;
};

// Reports a bug in dsengine.
class InternalError : public Error {
 public:
  using Error::Error;
};

}  // namespace ds
