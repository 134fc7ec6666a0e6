// The order in which a pass (forward and backward of one micro-batch) uses buckets: recorded in one pass, expected in
// the next. Pure bookkeeping, torch-free.
//
// What DeepSpeed's PartitionedParameterCoordinator calls its trace, on buckets in place of modules: a model is whatever
// its operators do, so nothing has to be declared and an order that changes is only recorded again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace ds::zero {

class UseTrace {
 public:
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  explicit UseTrace(std::vector<int64_t> elements_of_buckets);

  // The pass uses `bucket`, and used another one before.
  void use(size_t bucket);
  // The pass is over: the next one is expected to use what it used.
  void end_pass();
  // Forgets the running pass; the expected order stays, and a new pass begins.
  void restart();
  // There is an expected order, and the running pass has kept to it.
  bool following() const { return following_; }
  // What the expected order still holds for the running pass. Empty unless following().
  std::span<const size_t> upcoming() const;
  // Elements of the buckets that are used from now until the next use of `bucket`, without its own; kNever when it is
  // not used again in this pass or, with `wraps`, in this and the next one. Only while following().
  int64_t distance(size_t bucket, bool wraps) const;

 private:
  std::vector<int64_t> elements_;
  std::vector<size_t> recorded_;
  std::vector<size_t> expected_;
  std::vector<std::vector<size_t>> uses_;  // per bucket: positions in expected_, ascending
  std::vector<int64_t> before_;            // elements used before each position of expected_, and in all
  size_t position_ = 0;                    // in expected_: uses of the running pass so far
  bool following_ = false;
};

}  // namespace ds::zero
