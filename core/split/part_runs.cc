#include "core/split/part_runs.h"

#include <algorithm>

namespace ds {

PartRuns::PartRuns(const TensorPart& part) : outer_(1), whole_row_(1) {
  const std::vector<int64_t>& sizes = part.whole_sizes();
  const int64_t dim = part.cut().dim;
  int64_t inner = 1;
  for (int64_t d = 0; d < static_cast<int64_t>(sizes.size()); ++d) {
    if (d < dim) outer_ *= sizes[d];
    if (d > dim) inner *= sizes[d];
  }
  whole_row_ = sizes[dim] * inner;
  for (const DimRange& range : part.ranges()) {
    if (range.length * inner == 0) continue;
    const Range next{.whole = range.begin * inner, .part = part_row_, .length = range.length * inner};
    part_row_ += next.length;
    if (!ranges_.empty() && ranges_.back().whole + ranges_.back().length == next.whole) {
      ranges_.back().length += next.length;
    } else {
      ranges_.push_back(next);
    }
  }
}

void PartRuns::in_part(int64_t begin, int64_t end, const Run& run) const {
  end = std::min(end, numel());
  while (begin < end) {
    const int64_t row = begin / part_row_;
    const int64_t at = begin % part_row_;
    const auto after = std::upper_bound(ranges_.begin(), ranges_.end(), at,
                                        [](int64_t position, const Range& range) { return position < range.part; });
    for (auto range = after - 1; range != ranges_.end() && begin < end; ++range) {
      const int64_t skipped = begin - row * part_row_ - range->part;
      const int64_t length = std::min(range->length - skipped, end - begin);
      run(row * whole_row_ + range->whole + skipped, begin, length);
      begin += length;
    }
  }
}

void PartRuns::in_whole(int64_t begin, int64_t end, const Run& run) const {
  if (ranges_.empty() || begin >= end) return;
  for (int64_t row = begin / whole_row_; row < outer_ && row * whole_row_ < end; ++row) {
    const int64_t from = std::max<int64_t>(0, begin - row * whole_row_);
    const int64_t to = std::min(whole_row_, end - row * whole_row_);
    auto range = std::partition_point(ranges_.begin(), ranges_.end(),
                                      [&](const Range& one) { return one.whole + one.length <= from; });
    for (; range != ranges_.end() && range->whole < to; ++range) {
      const int64_t first = std::max(from, range->whole);
      const int64_t last = std::min(to, range->whole + range->length);
      run(row * whole_row_ + first, row * part_row_ + range->part + first - range->whole, last - first);
    }
  }
}

}  // namespace ds
