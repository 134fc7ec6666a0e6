// Checks that throw the errors of dsengine/errors.h. Torch-free.
//
// Two kinds of error: those a caller can act on (ConfigError, CommError, UsageError, IoError, NonFiniteError) and a
// broken invariant of ours (InternalError). Every message says what was expected, what was found, where, and what to
// change. The library throws and writes to its log (standard error). It ends the process in one place, where a rank
// that was told to end hangs: docs/process.md has the switch.
#pragma once

#include <source_location>

#include "core/text.h"
#include "dsengine/errors.h"

namespace ds {

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
