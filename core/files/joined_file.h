// How ds-launch learns which ranks of a job have met: it names a file in the environment of each, and a rank makes it
// when it comes to the others. A program that never does so has trained as often as there are ranks. Torch-free.
#pragma once

#include <fcntl.h>

#include <cstdlib>

#include "core/unique_fd.h"

namespace ds {

inline constexpr const char* kJoinedFileVariable = "DS_JOINED_FILE";

// Makes the file of this rank. Does nothing without a launcher, or without the file's folder. May be called again.
inline void note_joined() {
  const char* const file = std::getenv(kJoinedFileVariable);
  if (file == nullptr || *file == '\0') return;
  const UniqueFd made(open(file, O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
}

}  // namespace ds
