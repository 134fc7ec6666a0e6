#include <algorithm>
#include <utility>

#include "zero/gather/reuse_rule.h"

namespace ds::zero {
namespace {

// Without an order to go by, what was used this many uses ago is taken to be done with.
constexpr uint64_t kRecentUses = 2;

// A program that only evaluates never ends a pass.
constexpr size_t kLongestPass = size_t{1} << 20;

}  // namespace

bool ReuseRule::stays(size_t bucket) const {
  return following() ? distance(bucket) <= max_distance_ : last_use_[bucket] + kRecentUses > uses_;
}

int64_t ReuseRule::distance(size_t bucket) const {
  return following() ? trace_.distance(bucket, parameters_stay_) : static_cast<int64_t>(uses_ - last_use_[bucket]);
}

UseTrace::UseTrace(std::vector<int64_t> elements_of_buckets) : elements_(std::move(elements_of_buckets)) {}

void UseTrace::use(size_t bucket) {
  if (recorded_.size() == kLongestPass) recorded_.clear();
  recorded_.push_back(bucket);
  following_ = following_ && position_ < expected_.size() && expected_[position_] == bucket;
  if (following_) ++position_;
}

void UseTrace::end_pass() {
  if (!following_ || position_ != expected_.size()) {
    expected_ = std::exchange(recorded_, {});
    uses_.assign(elements_.size(), {});
    before_.assign(1, 0);
    for (size_t i = 0; i < expected_.size(); ++i) {
      uses_[expected_[i]].push_back(i);
      before_.push_back(before_.back() + elements_[expected_[i]]);
    }
  }
  restart();
}

void UseTrace::restart() {
  recorded_.clear();
  position_ = 0;
  following_ = !expected_.empty();
}

std::span<const size_t> UseTrace::upcoming() const {
  if (!following_) return {};
  return std::span(expected_).subspan(position_);
}

int64_t UseTrace::distance(size_t bucket, bool wraps) const {
  const std::vector<size_t>& uses = uses_[bucket];
  const auto next = std::lower_bound(uses.begin(), uses.end(), position_);
  if (next != uses.end()) return before_[*next] - before_[position_];
  if (!wraps || uses.empty()) return kNever;
  return before_.back() - before_[position_] + before_[uses.front()];
}

}  // namespace ds::zero
