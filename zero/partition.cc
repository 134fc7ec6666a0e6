#include "zero/partition.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string_view>
#include <tuple>
#include <utility>

#include "core/check.h"
#include "core/round_up.h"
#include "core/slices/segment_gaps.h"

namespace ds::zero {
namespace {

constexpr int64_t kMinTargetElements = 1 << 20;
constexpr int64_t kBucketsPerModel = 8;

// Neighbouring parameters of one module subtree that are kept together: [first, last).
struct Unit {
  size_t first = 0;
  size_t last = 0;
};

// The first component of `name` behind `prefix_length` characters, with its dot; empty for a parameter of the module
// itself.
std::string_view child_of(const std::string& name, size_t prefix_length) {
  const size_t dot = name.find('.', prefix_length);
  if (dot == std::string::npos) return {};
  return std::string_view(name).substr(prefix_length, dot + 1 - prefix_length);
}

// Splits [first, last), parameters of one module, into subtrees of at most `limit` elements.
void split_into_units(const std::vector<LayoutParameter>& parameters, Unit range, size_t prefix_length, int64_t limit,
                      std::vector<Unit>& units) {
  int64_t numel = 0;
  for (size_t i = range.first; i < range.last; ++i) numel += parameters[i].numel;
  if (numel <= limit || range.last - range.first == 1) {
    units.push_back(range);
    return;
  }
  for (size_t first = range.first; first < range.last;) {
    const std::string_view child = child_of(parameters[first].name, prefix_length);
    size_t last = first + 1;
    while (!child.empty() && last < range.last && child_of(parameters[last].name, prefix_length) == child) ++last;
    split_into_units(parameters, {first, last}, prefix_length + child.size(), limit, units);
    first = last;
  }
}

// The properties that the parameters of one bucket have in common: group, dtype, persistence, the dtype in which they
// are sent.
using BucketKey = std::tuple<int, int, bool, std::optional<int>>;

BucketKey key_of(const LayoutParameter& parameter) {
  return {parameter.group, parameter.dtype, parameter.persistent, parameter.sent_as};
}

// Buckets that still grow, one for each key.
class BucketBuilder {
 public:
  BucketBuilder(int world_size, int64_t target, int64_t max) : world_size_(world_size), target_(target), max_(max) {}

  // Opens a new bucket where `unit_numel` more elements would make the open one larger than the target.
  void reserve(const LayoutParameter& parameter, int64_t unit_numel) {
    auto found = open_.find(key_of(parameter));
    if (found != open_.end() && buckets_[found->second].numel + unit_numel > target_) open_.erase(found);
  }

  void add(const LayoutParameter& parameter, size_t index) {
    auto found = open_.find(key_of(parameter));
    if (found != open_.end() && buckets_[found->second].numel + parameter.numel > max_) {
      open_.erase(found);
      found = open_.end();
    }
    if (found == open_.end()) {
      BucketLayout fresh;
      fresh.group = parameter.group;
      fresh.dtype = parameter.dtype;
      fresh.persistent = parameter.persistent;
      fresh.sent_as = parameter.sent_as;
      fresh.row_width = parameter.row_width;
      buckets_.push_back(fresh);
      found = open_.emplace(key_of(parameter), buckets_.size() - 1).first;
    }
    BucketLayout& bucket = buckets_[found->second];
    bucket.segments.push_back({static_cast<int64_t>(index), 0, bucket.numel, parameter.numel});
    bucket.numel = round_up(bucket.numel + parameter.numel, kAlignment);
  }

  std::vector<BucketLayout> finish() && {
    for (BucketLayout& bucket : buckets_) {
      const int64_t unit = bucket.row_width > 0 ? std::lcm(bucket.row_width, kAlignment) : kAlignment;
      bucket.numel = round_up(std::max<int64_t>(bucket.numel, 1), world_size_ * unit);
      bucket.slice_numel = bucket.numel / world_size_;
    }
    return std::move(buckets_);
  }

 private:
  int64_t world_size_;
  int64_t target_;
  int64_t max_;
  std::vector<BucketLayout> buckets_;
  std::map<BucketKey, size_t> open_;
};

}  // namespace

int64_t default_target_elements(int64_t parameters) {
  return std::max(kMinTargetElements, parameters / kBucketsPerModel);
}

std::vector<BucketLayout> lay_out(const std::vector<LayoutParameter>& parameters, const LayoutOptions& options) {
  require(options.world_size > 0, "lay_out: expected a positive world size, found ", options.world_size);
  require(options.max_bucket_elements > 0, "lay_out: expected a positive bucket size, found ",
          options.max_bucket_elements);
  int64_t total = 0;
  for (const LayoutParameter& parameter : parameters) {
    total += parameter.numel;
    ensure(parameter.row_width == 0 || parameters.size() == 1, "a row-wise table is laid out alone");
  }
  int64_t wanted = options.target_bucket_elements;
  if (wanted <= 0) {
    wanted = default_target_elements(total);
    if (options.most_target_elements > 0) wanted = std::min(wanted, options.most_target_elements);
  }
  const int64_t target = std::min(wanted, options.max_bucket_elements);
  // A module slightly larger than the target stays whole: its boundary is worth more than an even size.
  const int64_t unit_limit = std::min(2 * target, options.max_bucket_elements);

  std::vector<Unit> units;
  if (!parameters.empty()) split_into_units(parameters, {0, parameters.size()}, 0, unit_limit, units);
  BucketBuilder builder(options.world_size, target, options.max_bucket_elements);
  for (const Unit& unit : units) {
    std::map<BucketKey, int64_t> numel;
    for (size_t i = unit.first; i < unit.last; ++i) numel[key_of(parameters[i])] += parameters[i].numel;
    for (size_t i = unit.first; i < unit.last; ++i) {
      auto planned = numel.find(key_of(parameters[i]));
      if (planned != numel.end()) {
        builder.reserve(parameters[i], planned->second);
        numel.erase(planned);
      }
      builder.add(parameters[i], i);
    }
  }
  return std::move(builder).finish();
}

std::vector<Segment> slice_segments(const BucketLayout& bucket, int rank) {
  const int64_t begin = rank * bucket.slice_numel;
  const int64_t end = begin + bucket.slice_numel;
  std::vector<Segment> result;
  for (const Segment& segment : bucket.segments) {
    const int64_t first = std::max(begin, segment.slice_offset);
    const int64_t last = std::min(end, segment.slice_offset + segment.length);
    if (first >= last) continue;
    result.push_back(
        {segment.parameter, segment.parameter_offset + first - segment.slice_offset, first - begin, last - first});
  }
  return result;
}

std::vector<std::pair<int64_t, int64_t>> padding_of(const BucketLayout& bucket) {
  return gaps_between(bucket.segments, bucket.numel);
}

}  // namespace ds::zero
