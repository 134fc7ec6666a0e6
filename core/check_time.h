// The time that a thread has spent on finding out what the program has done to its model, data and steps: the cost of
// keeping a ported program from training wrong in silence. benchmarks/checks_bench.cc reads it. Torch-free.
#pragma once

#include <chrono>

namespace ds {

class CheckTime {
 public:
  struct Total {
    std::chrono::nanoseconds own{0};
    std::chrono::nanoseconds waiting{0};  // for other ranks, which come later or compute
  };
  // The time of all scopes of this thread that have ended.
  static Total of_this_thread();

  // Adds the time from its construction to its end. A scope inside of another counts once, as waiting if it waits.
  class Scope {
   public:
    explicit Scope(bool waits = false);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    bool waits_;
    std::chrono::steady_clock::time_point begun_;
  };
};

}  // namespace ds
