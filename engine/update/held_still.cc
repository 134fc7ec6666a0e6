#include "engine/update/held_still.h"

#include <algorithm>
#include <string>

#include "core/check.h"
#include "zero/partition.h"

namespace ds::engine {
namespace {

// Of this rank's part of the bucket.
std::vector<Segment> held_segments(const ModelState& state, size_t bucket) {
  const zero::BucketLayout& layout = state.buckets[bucket].layout();
  std::vector<Segment> segments = state.plan.partition_optimizer
                                      ? zero::slice_segments(layout, state.groups_of(bucket).shards.rank())
                                      : layout.segments;
  segments.erase(std::remove_if(segments.begin(), segments.end(),
                                [&](const Segment& segment) {
                                  return state.held_still[static_cast<size_t>(segment.parameter)] == 0;
                                }),
                 segments.end());
  return segments;
}

}  // namespace

bool HeldStill::wanted(const ModelState& state, size_t bucket) {
  const std::vector<Segment>& segments = state.buckets[bucket].layout().segments;
  return std::any_of(segments.begin(), segments.end(), [&](const Segment& segment) {
    return state.held_still[static_cast<size_t>(segment.parameter)] != 0;
  });
}

void HeldStill::require_possible(const ModelState& state) {
  const auto frozen = std::find(state.held_still.begin(), state.held_still.end(), 1);
  if (frozen == state.held_still.end() || !state.optimizer.own) return;
  const std::string& name = state.parameters[static_cast<size_t>(frozen - state.held_still.begin())].name;
  const zero::Offload& offload = state.plan.offload;
  const char* reason = offload.delayed                          ? "delayed_update"
                       : offload.speculative                    ? "super_offload"
                       : offload.optimizer == zero::Home::kFile ? "offload_optimizer to files"
                       : state.plan.error_feedback              ? "an optimizer that compresses momenta"
                                                                : nullptr;
  require(reason == nullptr, "step(): parameter ", name, " was frozen after initialize(), which ", reason,
          " cannot follow: it would go on moving by its momentum. Freeze it before initialize()");
}

HeldStill::HeldStill(const ModelState& state, size_t bucket, const at::Tensor& own) {
  const std::vector<Segment> segments = held_segments(state, bucket);
  if (segments.empty()) return;
  const at::Tensor& master = state.masters[bucket];
  std::vector<at::Tensor> tensors = {master};
  if (!own.is_alias_of(master)) tensors.push_back(own);
  for (const auto& [name, values] : state.optimizer.states(bucket)) {
    ensure(values.numel() == master.numel(), "states of an optimizer that holds parameters still are flat slices");
    tensors.push_back(values);
  }
  for (const at::Tensor& tensor : tensors) {
    for (const Segment& segment : segments) {
      const at::Tensor part = tensor.narrow(0, segment.slice_offset, segment.length);
      kept_.emplace_back(part, part.clone());
    }
  }
}

void HeldStill::restore() const {
  for (const auto& [part, values] : kept_) part.copy_(values);
}

}  // namespace ds::engine
