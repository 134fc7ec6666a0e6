#include "zero/gather/reuse_rule.h"

namespace ds::zero {
namespace {

// Without an order to go by, what was used this many uses ago is taken to be done with.
constexpr uint64_t kRecentUses = 2;

}  // namespace

bool ReuseRule::stays(size_t bucket) const {
  return following() ? distance(bucket) <= max_distance_ : last_use_[bucket] + kRecentUses > uses_;
}

int64_t ReuseRule::distance(size_t bucket) const {
  return following() ? trace_.distance(bucket, parameters_stay_) : static_cast<int64_t>(uses_ - last_use_[bucket]);
}

}  // namespace ds::zero
