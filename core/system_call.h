// Checking system calls, and naming the system's errors in messages.
#pragma once

#include <cerrno>
#include <cstring>
#include <ostream>
#include <system_error>

#include "core/check.h"

namespace ds {

// The system's text of an error number or code, as a part of a message: "No such file or directory".
class SystemReason {
 public:
  explicit SystemReason(int error) : error_(error, std::generic_category()) {}
  explicit SystemReason(const std::error_code& error) : error_(error) {}
  friend std::ostream& operator<<(std::ostream& out, const SystemReason& reason) {
    return out << reason.error_.message();
  }

 private:
  std::error_code error_;
};

// Throws E with the parts joined and the system's reason, when a call did not succeed. errno is read here, after the
// call: as an argument beside the call it could be read before it.
template <class E = UsageError, class... Parts>
void require_system(bool succeeded, const Parts&... parts) {
  if (!succeeded) [[unlikely]] {
    const int error = errno;
    throw E(cat(parts..., ": ", SystemReason(error)));
  }
}

}  // namespace ds
