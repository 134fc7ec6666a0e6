// Keeps LibTorch from warning on standard error that the other end of a store's connection is gone.
#pragma once

namespace ds::comm {

// While one lives, LibTorch's log begins at errors: the store of a rank that has ended is no news beside the exception
// that the caller gets, and that names the rank. The level is the process's, so these live as long as a call of the
// store. Thread-safe.
class QuietStore {
 public:
  QuietStore();
  ~QuietStore();
  QuietStore(const QuietStore&) = delete;
  QuietStore& operator=(const QuietStore&) = delete;
};

}  // namespace ds::comm
