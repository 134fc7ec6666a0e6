// The order in which passes use buckets, and which gathered buckets stay in memory because of it: those that are used
// again soon, by the order of the last pass, or those that were used just now, where there is no order to go by. Pure
// bookkeeping, torch-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

namespace ds::zero {

// The order in which a pass (forward and backward of one micro-batch) uses buckets: recorded in one pass, expected in
// the next. DeepSpeed's PartitionedParameterCoordinator calls it the trace and keeps it for modules; here it is kept
// for buckets: a model is whatever its operators do, so nothing has to be declared and an order that changes is only
// recorded again.
class UseTrace {
 public:
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  explicit UseTrace(std::vector<int64_t> elements_of_buckets);

  // Notes that the pass uses `bucket`; the use before was of another one.
  void use(size_t bucket);
  // Ends the pass: the next one is expected to use what it used.
  void end_pass();
  // Forgets the running pass; the expected order stays, and a new pass begins.
  void restart();
  // True when there is an expected order and the running pass has kept to it.
  bool following() const { return following_; }
  // The uses that the expected order still holds for the running pass. Empty unless following().
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

// Decides from the uses alone, so all ranks that run the same operators decide alike.
class ReuseRule {
 public:
  // max_distance: elements of other buckets that may be used before the next use of one that stays.
  ReuseRule(std::vector<int64_t> elements_of_buckets, int64_t max_distance)
      : last_use_(elements_of_buckets.size(), 0), trace_(std::move(elements_of_buckets)), max_distance_(max_distance) {}

  // Notes that the pass uses `bucket`; the use before was of another one.
  void use(size_t bucket) {
    last_use_[bucket] = ++uses_;
    trace_.use(bucket);
  }
  // Says whether an update follows the running pass. Without one, the next pass can use what this one has gathered.
  void expect_update(bool follows) { parameters_stay_ = !follows; }
  // Ends the pass: the next one is expected to use what it used.
  void end_pass() {
    trace_.end_pass();
    parameters_stay_ = true;
  }
  // Begins a pass that does not follow the one before.
  void restart() { trace_.restart(); }

  // True when the running pass keeps to the order of the last one.
  bool following() const { return trace_.following(); }
  // The uses that this order still holds. Empty unless following().
  std::span<const size_t> upcoming() const { return trace_.upcoming(); }
  // Whether a gathered bucket stays in memory, because it is used again soon.
  bool stays(size_t bucket) const;
  // How far away the next use of the bucket is, to be compared: in elements by the order, else in uses since its last.
  int64_t distance(size_t bucket) const;

 private:
  std::vector<uint64_t> last_use_;  // per bucket: by count of uses
  UseTrace trace_;
  int64_t max_distance_;
  uint64_t uses_ = 0;
  bool parameters_stay_ = true;  // the running pass is not followed by an update, as far as is known
};

}  // namespace ds::zero
