// The state of a process of this host, from the kernel. Torch-free.
#pragma once

#include <cstdint>

namespace ds::comm {

// Returns the state of a process (proc(5)): 'R', 'S', 'D', 'T', 'Z', ...; '-': there is none, '?': the kernel does not
// say.
char state_of_process(int64_t process);

// Returns when a process was started, in ticks since the boot, which tells it from a later one of the same number; 0:
// it is gone, or a zombie.
uint64_t start_of_process(int64_t process);

}  // namespace ds::comm
