// Keeps LibTorch from warning on standard error that the other end of a store's connection is gone.
#pragma once

namespace ds::comm {

// While one lives, LibTorch's log begins at errors: the store of a rank that has ended is no news beside the exception
// that the caller gets, and that names the rank. The level is the process's, so warnings of its other threads are not
// written meanwhile, and these live as long as a call of the store. The level of before comes back with the end of the
// last one, unless somebody has set another one. Thread-safe among themselves.
class QuietStore {
 public:
  QuietStore();
  ~QuietStore();
  QuietStore(const QuietStore&) = delete;
  QuietStore& operator=(const QuietStore&) = delete;
};

}  // namespace ds::comm
