// The gaps that the segments of a flat tensor leave uncovered. Torch-free.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/slices/segment.h"

namespace ds {

// Runs of elements in [0, numel) that no segment covers, as {offset, length}. Segments ascend by slice_offset.
inline std::vector<std::pair<int64_t, int64_t>> gaps_between(const std::vector<Segment>& segments, int64_t numel) {
  std::vector<std::pair<int64_t, int64_t>> gaps;
  int64_t end = 0;
  for (const Segment& segment : segments) {
    if (segment.slice_offset > end) gaps.emplace_back(end, segment.slice_offset - end);
    end = segment.slice_offset + segment.length;
  }
  if (end < numel) gaps.emplace_back(end, numel - end);
  return gaps;
}

}  // namespace ds
