#include "loops/own_parts.h"

#include <algorithm>

#include "core/check.h"
#include "core/split/part_runs.h"
#include "core/split/split_tensor.h"
#include "loops/sharded_model.h"

namespace ds::loops {
namespace {

const std::vector<const ShardedTensor*>& parts_of(const OwnPart& own, const GivenParts& given) {
  static const std::vector<const ShardedTensor*> kNone;
  const auto found = given.find(own.name);
  return found == given.end() ? kNone : found->second;
}

// The elements that both have, as offsets in the flattened full tensor; empty where `from` is not before `to`.
struct Run {
  int64_t from = 0, to = 0;
};

Run common_run(const OwnPart& own, const ShardedTensor& one) {
  return {std::max(own.offset, one.offset), std::min(own.offset + own.values.numel(), one.offset + one.values.numel())};
}

// Elements of `own` that others have, each counted once: copies of the model write the same ones.
int64_t covered(const OwnPart& own, const std::vector<const ShardedTensor*>& given) {
  std::vector<Run> runs;
  for (const ShardedTensor* one : given) {
    const Run run = common_run(own, *one);
    if (run.from < run.to) runs.push_back(run);
  }
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.from < b.from; });
  int64_t elements = 0;
  int64_t end = own.offset;
  for (const Run& run : runs) {
    elements += std::max<int64_t>(run.to - std::max(run.from, end), 0);
    end = std::max(end, run.to);
  }
  return elements;
}

}  // namespace

std::vector<OwnPart> own_parts(const ShardedModel& model) {
  const engine::ModelState& state = model.state();
  std::vector<OwnPart> parts;
  for (const SliceLeaf& leaf : model.leaves()) {
    const zero::Parameter& parameter = state.parameters[leaf.parameter];
    parts.push_back(
        {leaf.name, parameter.whole_sizes(), leaf.place.parameter_offset, leaf.tensor.detach(), parameter.part});
  }
  const int rank = model.ranks().shards->rank();
  for (const zero::ParameterBucket& bucket : state.frozen_buckets) {
    const at::Tensor slice = bucket.slice(rank);
    for (const Segment& own : zero::slice_segments(bucket.layout(), rank)) {
      const zero::Parameter& parameter = state.frozen[static_cast<size_t>(own.parameter)];
      parts.push_back({parameter.name, parameter.whole_sizes(), own.parameter_offset,
                       slice.narrow(0, own.slice_offset, own.length), parameter.part});
    }
  }
  if (!state.frozen_buckets.empty()) return parts;
  for (const zero::Parameter& frozen : state.frozen) {
    parts.push_back({frozen.name, frozen.whole_sizes(), 0, frozen.tensor.detach().view({-1}), frozen.part});
  }
  return parts;
}

std::vector<OwnPart> runs_of(const OwnPart& own) {
  if (!own.part || own.values.numel() == 0) return {own};
  std::vector<OwnPart> runs;
  PartRuns(*own.part).in_part(
      own.offset, own.offset + own.values.numel(), [&](int64_t whole, int64_t part, int64_t length) {
        runs.push_back({own.name, own.sizes, whole, own.values.narrow(0, part - own.offset, length)});
      });
  return runs;
}

at::Tensor elements_of(const OwnPart& own, const at::Tensor& whole) {
  const at::Tensor there = own.part ? slice_of(whole, *own.part) : whole;
  return there.reshape({-1}).narrow(0, own.offset, own.values.numel());
}

GivenParts given_parts(const std::vector<ShardedTensor>& parts) {
  GivenParts given;
  for (const ShardedTensor& part : parts) given[part.name].push_back(&part);
  return given;
}

void require_covered(const char* call, const OwnPart& own, const GivenParts& given) {
  const auto& parts = parts_of(own, given);
  for (const ShardedTensor* one : parts) {
    require(one->sizes == own.sizes, call, ": ", own.name, ": expected parts of a tensor of shape ",
            at::IntArrayRef(own.sizes), ", found ", at::IntArrayRef(one->sizes));
  }
  const int64_t found = covered(own, parts);
  require(found == own.values.numel(), call, ": ", own.name, ": expected parts with all of its elements ", own.offset,
          " to ", own.offset + own.values.numel(), ", which are this rank's, found ", found,
          " of them; give it the parts of all ranks that wrote them");
}

void copy_parts(const OwnPart& own, const GivenParts& given) {
  for (const ShardedTensor* one : parts_of(own, given)) {
    const auto [from, to] = common_run(own, *one);
    if (from >= to) continue;
    own.values.narrow(0, from - own.offset, to - from)
        .copy_(one->values.reshape({-1}).narrow(0, from - one->offset, to - from));
  }
}

}  // namespace ds::loops
