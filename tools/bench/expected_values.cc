#include "tools/bench/expected_values.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <vector>

#include "core/check.h"

namespace ds::tool::bench {
namespace {

constexpr int64_t kPeriod = 509;
constexpr int64_t kPlainLimit = 127;  // of values that are only copied
constexpr int64_t kSummedLimit = 8;

// All integers up to it are exact.
int64_t exact_up_to(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16:
      return 1 << 8;
    case at::kHalf:
      return 1 << 11;
    case at::kChar:
      return 127;
    case at::kByte:
      return 255;
    default:
      return 1 << 24;
  }
}

int64_t combined(comm::ReduceOp op, int64_t one, int64_t other) {
  if (op == comm::ReduceOp::kSum) return one + other;
  return op == comm::ReduceOp::kMin ? std::min(one, other) : std::max(one, other);
}

}  // namespace

ExpectedValues::ExpectedValues(at::ScalarType dtype, at::Device device, int ranks, bool reduced)
    : dtype_(dtype), device_(device), ranks_(ranks), limit_(kPlainLimit), giving_(ranks) {
  if (!reduced) return;
  // `never` must not be a sum either.
  const int64_t most = std::min<int64_t>(exact_up_to(dtype), 126);
  limit_ = std::clamp<int64_t>(most / ranks + 1, 2, kSummedLimit);
  giving_ = static_cast<int>(std::min<int64_t>(ranks, most / (limit_ - 1)));
}

int64_t ExpectedValues::value(int rank, int64_t position) const {
  if (rank >= giving_) return 0;
  return (int64_t{29} * rank + position * 13 + position * position) % limit_;
}

at::Tensor ExpectedValues::repeat(const std::vector<double>& period, int64_t start, int64_t count) const {
  std::vector<double> turned = period;
  std::rotate(turned.begin(), turned.begin() + start % kPeriod, turned.end());
  const at::Tensor once = at::tensor(turned).to(device_, dtype_);
  return once.repeat({(count + kPeriod - 1) / kPeriod}).narrow(0, 0, count);
}

at::Tensor ExpectedValues::of_rank(int rank, int64_t start, int64_t count) const {
  std::vector<double> period;
  for (int64_t i = 0; i < kPeriod; ++i) period.push_back(static_cast<double>(value(rank, i)));
  return repeat(period, start, count);
}

at::Tensor ExpectedValues::of_all(comm::ReduceOp op, int64_t start, int64_t count) const {
  std::vector<double> period;
  for (int64_t i = 0; i < kPeriod; ++i) {
    int64_t result = value(0, i);
    for (int rank = 1; rank < ranks_; ++rank) result = combined(op, result, value(rank, i));
    period.push_back(static_cast<double>(result));
  }
  return repeat(period, start, count);
}

}  // namespace ds::tool::bench
