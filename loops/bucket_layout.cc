#include "loops/bucket_layout.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

namespace ds::loops {
namespace {

// Some of the parameters, by their numbers, in ascending order.
using Numbers = std::vector<size_t>;

// Parameters of one device and dtype.
std::vector<Numbers> alike(const std::vector<zero::Parameter>& parameters) {
  std::vector<Numbers> result;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& tensor = parameters[i].tensor;
    const auto same = std::find_if(result.begin(), result.end(), [&](const Numbers& numbers) {
      const at::Tensor& other = parameters[numbers.front()].tensor;
      return other.device() == tensor.device() && other.scalar_type() == tensor.scalar_type();
    });
    if (same == result.end()) {
      result.push_back({i});
    } else {
      same->push_back(i);
    }
  }
  return result;
}

// The first of the last parameters that are at most `bytes` together, one at least.
size_t begin_of_first_bucket(const std::vector<zero::Parameter>& parameters, const Numbers& numbers, int64_t bytes) {
  size_t begin = numbers.size();
  int64_t total = 0;
  while (begin > 0) {
    total += static_cast<int64_t>(parameters[numbers[begin - 1]].tensor.nbytes());
    if (total > bytes && begin < numbers.size()) break;
    --begin;
  }
  return begin;
}

void lay_out_some(const std::vector<zero::Parameter>& parameters, const Numbers& numbers, int64_t cap, int ranks,
                  std::vector<zero::BucketLayout>& result) {
  if (numbers.empty()) return;
  std::vector<zero::LayoutParameter> shapes;
  for (const size_t number : numbers) shapes.push_back({parameters[number].name, parameters[number].tensor.numel()});
  const int64_t element = parameters[numbers.front()].tensor.element_size();
  const int64_t elements = std::max<int64_t>(1, cap / element);
  for (zero::BucketLayout& bucket : zero::lay_out(
           shapes, {.world_size = ranks, .max_bucket_elements = elements, .target_bucket_elements = elements})) {
    for (Segment& segment : bucket.segments) {
      segment.parameter = static_cast<int64_t>(numbers[static_cast<size_t>(segment.parameter)]);
    }
    result.push_back(std::move(bucket));
  }
}

}  // namespace

std::vector<zero::BucketLayout> lay_out_gradients(const std::vector<zero::Parameter>& parameters,
                                                  const BucketCaps& caps, int ranks) {
  std::vector<zero::BucketLayout> result;
  for (const Numbers& numbers : alike(parameters)) {
    const auto begin = static_cast<std::ptrdiff_t>(begin_of_first_bucket(parameters, numbers, caps.first_bytes));
    lay_out_some(parameters, {numbers.begin(), numbers.begin() + begin}, caps.bytes, ranks, result);
    lay_out_some(parameters, {numbers.begin() + begin, numbers.end()}, caps.first_bytes, ranks, result);
  }
  std::sort(result.begin(), result.end(), [](const zero::BucketLayout& a, const zero::BucketLayout& b) {
    return a.segments.front().parameter < b.segments.front().parameter;
  });
  return result;
}

}  // namespace ds::loops
