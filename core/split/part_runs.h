// Runs of elements of a tensor that lie together both in the full tensor and in one rank's part, found from either
// side: those of for_each_run in core/split/tensor_part.h, without going through the elements before. Torch-free.
//
// Elements are counted in row-major order, and ascend in the full tensor as they do in the part: so the elements of any
// range of the full tensor are one range of the part.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/split/tensor_part.h"

namespace ds {

class PartRuns {
 public:
  explicit PartRuns(const TensorPart& part);

  // Elements that the part has.
  int64_t numel() const { return outer_ * part_row_; }

  // Called with the place of a run in the full tensor, its place in the part, and its length.
  using Run = TensorPart::Run;
  // Calls `run` for each run of the elements [begin, end) of the part.
  void in_part(int64_t begin, int64_t end, const Run& run) const;
  // Calls `run` for each run of those of the elements [begin, end) of the full tensor that the part has.
  void in_whole(int64_t begin, int64_t end, const Run& run) const;

 private:
  struct Range {  // a part of one row: its begin in the full tensor's row and in the part's row, and its elements
    int64_t whole;
    int64_t part;
    int64_t length;
  };
  std::vector<Range> ranges_;
  int64_t outer_;      // rows: elements of the dimensions before the one that is cut
  int64_t whole_row_;  // elements of a row
  int64_t part_row_ = 0;
};

}  // namespace ds
