#include "zero/gather/use_trace.h"

#include <algorithm>
#include <utility>

namespace ds::zero {
namespace {

// A program that only evaluates never ends a pass.
constexpr size_t kLongestPass = size_t{1} << 20;

}  // namespace

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
