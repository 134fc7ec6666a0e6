// The stack of a thread of this process, read from another thread.
#pragma once

#include <pthread.h>

#include <chrono>
#include <string>
#include <vector>

namespace ds::comm {

// The stack of the thread that makes it. Made on the thread that is to be looked at, and used while that thread lives.
class HostStack {
 public:
  // Takes a free real-time signal, once in a process. Where none is free, frames() is empty.
  HostStack();

  // Names of the functions on the thread's stack, innermost first, without this class's own; empty when the thread does
  // not answer within the limit (it is stopped, or blocks the signal). A system call that the thread waits in may end
  // with EINTR. Functions have names where the program exports them (-rdynamic, which dsengine's CMake target sets);
  // others are "program+0x1234", for addr2line.
  std::vector<std::string> frames(std::chrono::milliseconds limit) const;

 private:
  pthread_t thread_;
};

}  // namespace ds::comm
