#include "loops/slice_leaves.h"

#include "zero/partition.h"

namespace ds::loops {

std::vector<SliceLeaf> slice_leaves(const engine::ModelState& state) {
  std::vector<SliceLeaf> leaves(state.parameters.size());
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    const zero::BucketLayout& layout = state.buckets[b].layout();
    for (const Segment& whole : layout.segments) {
      const auto parameter = static_cast<size_t>(whole.parameter);
      leaves[parameter] = {.name = state.parameters[parameter].name,
                           .parameter = parameter,
                           .bucket = b,
                           .place = {.parameter = whole.parameter},
                           .tensor = {}};
    }
    for (const Segment& own : zero::slice_segments(layout, state.groups_of(b).shards.rank())) {
      leaves[static_cast<size_t>(own.parameter)].place = own;
    }
  }
  for (SliceLeaf& leaf : leaves) {
    const at::Tensor part = state.masters[leaf.bucket].narrow(0, leaf.place.slice_offset, leaf.place.length).detach();
    leaf.tensor = part.set_requires_grad(true);
  }
  return leaves;
}

}  // namespace ds::loops
