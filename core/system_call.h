// Checking system calls.
#pragma once

#include <cerrno>
#include <cstring>

#include "core/check.h"

namespace ds {

// Throws E with the parts joined and the system's reason, when a call did not succeed. errno is read here, after the
// call: as an argument beside the call it could be read before it.
template <class E = UsageError, class... Parts>
void require_system(bool succeeded, const Parts&... parts) {
  if (!succeeded) [[unlikely]] {
    const int error = errno;
    throw E(cat(parts..., ": ", std::strerror(error)));
  }
}

}  // namespace ds
