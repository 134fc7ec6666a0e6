// Which gathered buckets stay: what is used again soon, by the order that the last pass had, or what was used just now
// where there is no order to go by. Pure bookkeeping, torch-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "zero/gather/use_trace.h"

namespace ds::zero {

// Decides from the uses alone, so all ranks that run the same operators decide alike.
class ReuseRule {
 public:
  // max_distance: elements of other buckets that may be used before the next use of one that stays.
  ReuseRule(std::vector<int64_t> elements_of_buckets, int64_t max_distance)
      : last_use_(elements_of_buckets.size(), 0), trace_(std::move(elements_of_buckets)), max_distance_(max_distance) {}

  // The pass uses `bucket`, and used another one before.
  void use(size_t bucket) {
    last_use_[bucket] = ++uses_;
    trace_.use(bucket);
  }
  // Whether the parameters stay as they are after the running pass, so that the next one can use what this one has.
  void expect_update(bool follows) { parameters_stay_ = !follows; }
  // The pass is over; the next one is expected to use what it used.
  void end_pass() {
    trace_.end_pass();
    parameters_stay_ = true;
  }
  // A pass begins that does not follow the one before.
  void restart() { trace_.restart(); }

  // The running pass keeps to the order of the last one.
  bool following() const { return trace_.following(); }
  // What that order still holds. Empty unless following().
  std::span<const size_t> upcoming() const { return trace_.upcoming(); }
  bool stays(size_t bucket) const;
  // How far away a use of it is, to compare: in the order, else since its last use.
  int64_t distance(size_t bucket) const;

 private:
  std::vector<uint64_t> last_use_;  // per bucket: by count of uses
  UseTrace trace_;
  int64_t max_distance_;
  uint64_t uses_ = 0;
  bool parameters_stay_ = true;  // the running pass is not followed by an update, as far as is known
};

}  // namespace ds::zero
