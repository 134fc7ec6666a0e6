#include "optim/bucket_parameters.h"

#include <algorithm>

#include "core/check.h"

namespace ds::optimizers {

std::vector<BucketParameter> bucket_parameters(const Slice& slice, const char* optimizer) {
  // Alone, the slice is the bucket.
  const std::vector<Segment>& segments = slice.exchange->size() == 1 ? slice.segments : slice.bucket_segments;
  std::vector<BucketParameter> result;
  for (const Segment& segment : segments) {
    auto found = std::find_if(result.begin(), result.end(),
                              [&](const BucketParameter& known) { return known.parameter == segment.parameter; });
    if (found == result.end()) found = result.insert(found, {segment.parameter, {}});
    found->runs.push_back(segment);
  }
  for (BucketParameter& known : result) {
    std::sort(known.runs.begin(), known.runs.end(),
              [](const Segment& a, const Segment& b) { return a.parameter_offset < b.parameter_offset; });
    int64_t expected = 0;
    const ParameterInfo& info = (*slice.parameters)[static_cast<size_t>(known.parameter)];
    for (const Segment& run : known.runs) {
      require(run.parameter_offset == expected, optimizer, " needs whole parameters in a bucket: expected element ",
              expected, " of ", info.name, " next, found ", run.parameter_offset);
      expected += run.length;
    }
    require(expected == info.numel, optimizer, " needs whole parameters in a bucket: expected the ", info.numel,
            " elements of ", info.name, ", found ", expected);
  }
  return result;
}

}  // namespace ds::optimizers
