// A pipe whose ends have owners.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include "core/unique_fd.h"

namespace ds::launcher {

struct Pipe {
  UniqueFd reader, writer;

  bool valid() const { return reader.valid(); }
};

// Opens a pipe whose ends close at exec. Not valid, with errno set, where the system gives no descriptors.
inline Pipe open_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return {};
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

}  // namespace ds::launcher
