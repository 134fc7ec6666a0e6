// Values that a piece of code decides when it runs, and must find again when it is computed again for backward: whether
// a layer is dropped, which tokens it keeps. Activation checkpointing, which computes pieces again, keeps the values on
// a tape; the code that decides asks replayed() and needs to know of no tape.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace ds {

struct ReplayScope;

// The values of one piece in the order in which they were asked for. On a thread, tapes nest as pieces do.
class ReplayTape {
 public:
  // Records the values of replayed() on this thread while it lives. A piece inside one that is computed again takes its
  // values from the outer one's tape.
  class Recording {
   public:
    explicit Recording(ReplayTape& tape);
    ~Recording();
    Recording(const Recording&) = delete;
    Recording& operator=(const Recording&) = delete;

   private:
    const std::unique_ptr<ReplayScope> scope_;
  };
  // Makes replayed() on this thread give the tape's values again while it lives, from the first.
  class Playing {
   public:
    explicit Playing(const ReplayTape& tape);
    ~Playing();
    // Whether all values were asked for.
    bool finished() const;
    Playing(const Playing&) = delete;
    Playing& operator=(const Playing&) = delete;

   private:
    const std::unique_ptr<ReplayScope> scope_;
  };

  // Whether this thread's code will be computed again: it is not to be taken for a mere look at the model.
  static bool recording();
  // The next value of the innermost tape, else of `decide`. Throws UsageError where more values are asked for than the
  // first run asked for.
  static int64_t replayed(const std::function<int64_t()>& decide);

 private:
  std::vector<int64_t> values_;
};

}  // namespace ds
