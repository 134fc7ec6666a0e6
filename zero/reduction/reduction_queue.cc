#include "zero/reduction/reduction_queue.h"

#include <thread>
#include <utility>

#include "core/log.h"

namespace ds::zero {
namespace {

// The longest time that a device takes to come to a launch: in training it is seconds behind at most.
constexpr std::chrono::seconds kLongestWay{30};

// Reductions that may be under way inside backward, beside the bucket that fills: bounds memory.
constexpr size_t kMostInFlight = 2;

}  // namespace

void LateReductions::begin_pass() {
  late_in_this_pass_ = false;
  if (passes_ == 0 || ++since_late_ < forgotten_after_) return;
  since_late_ = 0;
  --passes_;
}

bool LateReductions::in_time(const comm::Work& work, size_t bucket, c10::function_ref<bool()> launched) {
  using Clock = std::chrono::steady_clock;
  if (!patience_) return true;
  const std::chrono::milliseconds patience = *patience_ * (1 << passes_);
  Clock::time_point until = Clock::now() + kLongestWay;
  bool counts = false;
  while (!work.is_ready()) {
    if (late_in_this_pass_ || passes_ == kMostPasses) return false;
    if (!counts && launched()) {
      counts = true;
      until = Clock::now() + patience;
    }
    if (Clock::now() >= until) return be_late(bucket, patience);
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

bool LateReductions::be_late(size_t bucket, std::chrono::milliseconds waited) {
  late_in_this_pass_ = true;
  since_late_ = 0;
  if (++passes_ < kMostPasses) return false;
  if (!std::exchange(warned_, true)) {
    log::warning("the reduction of gradients of bucket ", bucket, " is late, as others were in ", kMostPasses - 1,
                 " backward passes before: another rank has no gradient for a parameter in it, ",
                 "or the network is slower than ", std::chrono::duration<double>(waited).count(),
                 " s for a bucket. Gradients stay in memory until backward ends from now on, and it is tried again in ",
                 forgotten_after_, " passes (said once)");
  } else {
    forgotten_after_ *= 2;
  }
  return false;
}

void ReductionQueue::begin_pass(std::vector<char> in_pass) {
  next_ = 0;
  late_.begin_pass();
  in_pass_ = std::move(in_pass);
  for (GradientBucket& bucket : buckets_) {
    if (bucket.launched()) {
      complete(bucket);
      if (!exchange_.options().plain_gradients()) bucket.set_aside();
    }
    bucket.begin_pass();
  }
}

void ReductionQueue::launch_rest() {
  launch_next(/*all=*/true);
  if (exchange_.options().transient() || exchange_.options().leave_in_backward) retire(0, /*inside_backward=*/false);
}

// Launches, in the fixed order, the buckets whose gradients are all there (or all of the pass).
void ReductionQueue::launch_next(bool all) {
  const ReducerOptions& options = exchange_.options();
  const bool bounded = options.transient() || options.leave_in_backward || exchange_.makes_copies();
  while (next_ < buckets_.size()) {
    const size_t index = buckets_.size() - 1 - next_;
    const bool in_pass = is_in_pass(index);
    if (in_pass && !all && !buckets_[index].all_arrived()) return;
    ++next_;
    if (!in_pass) continue;
    launch(buckets_[index]);
    if (bounded) retire(kMostInFlight, /*inside_backward=*/!all);
  }
}

void ReductionQueue::launch_all() {
  for (size_t i = buckets_.size(); i-- > 0;) {
    if (!buckets_[i].launched()) launch(buckets_[i]);
  }
}

void ReductionQueue::launch(GradientBucket& bucket) {
  bucket.launch();
  in_flight_.push_back(bucket.index());
}

void ReductionQueue::complete(GradientBucket& bucket) {
  if (bucket.state() == BucketState::kInFlight) bucket.complete();
  std::erase(in_flight_, bucket.index());
}

void ReductionQueue::complete_all() {
  for (GradientBucket& bucket : buckets_) {
    if (bucket.state() == BucketState::kInFlight) complete(bucket);
  }
  in_flight_.clear();
}

// Completes the oldest reductions until so many are under way; of a reduction in several exchanges, that begins the
// later ones. Gradients leave the buckets that are given back, and those that can leave early for elsewhere.
void ReductionQueue::retire(size_t staying, bool inside_backward) {
  const ReducerOptions& options = exchange_.options();
  while (in_flight_.size() > staying) {
    GradientBucket& bucket = buckets_[in_flight_.front()];
    const GradientTransfer& transfer = bucket.transfer();
    if (inside_backward &&
        !late_.in_time(transfer.work, bucket.index(), [&] { return transfer.launch_point.reached(); })) {
      return;
    }
    complete(bucket);
    if (options.transient() || (options.leave_in_backward && exchange_.elsewhere_of(bucket.index()))) {
      bucket.set_aside();
    }
  }
}

void ReductionQueue::finish() {
  for (GradientBucket& bucket : buckets_) {
    if (!bucket.launched()) continue;
    complete(bucket);
    if (exchange_.elsewhere_of(bucket.index())) {
      bucket.set_aside();
    } else {
      bucket.join_sum();
    }
  }
}

}  // namespace ds::zero
