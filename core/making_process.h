// Objects that end only in the process that made them.
//
// Note [Forked children]
// fork() copies all objects of a process and none of its threads but the caller's. A destructor that joins a thread,
// or waits for work that a thread does, would wait for ever in the child; one that tells other ranks of the end, or
// removes a file, would do so for the parent, which goes on. So whoever owns threads, connections, shared memory or
// files that others see is held by OwnedWhereMade, or asks a MakingProcess: a child that ends leaves all of it as it
// is. Nothing leaks that the end of the child does not free.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <memory>
#include <utility>

namespace ds {

// The process in which this was made; copies keep it.
class MakingProcess {
 public:
  bool is_this() const { return getpid() == process_; }

 private:
  pid_t process_ = getpid();
};

// The deleter of what ends only where it was made.
template <class T>
struct DeleteWhereMade {
  MakingProcess process;
  void operator()(T* object) const {
    if (process.is_this()) delete object;
  }
};

template <class T>
using OwnedWhereMade = std::unique_ptr<T, DeleteWhereMade<T>>;

template <class T, class... Arguments>
OwnedWhereMade<T> make_owned_where_made(Arguments&&... arguments) {
  return OwnedWhereMade<T>(new T(std::forward<Arguments>(arguments)...));
}

template <class T, class... Arguments>
std::shared_ptr<T> make_shared_where_made(Arguments&&... arguments) {
  return std::shared_ptr<T>(new T(std::forward<Arguments>(arguments)...), DeleteWhereMade<T>());
}

}  // namespace ds
