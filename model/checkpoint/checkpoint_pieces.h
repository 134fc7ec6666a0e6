// The model state that this rank holds, as pieces of logical tensors.
//
// Every element of the state belongs to exactly one rank: its own slice or, where several ranks hold the same (stage 0,
// the replicas of MiCS), an equal part of it. So all ranks write, and nothing is written twice. Each rank of a tensor
// axis writes its own part of the split parameters, as such; whole parameters are written by the axis' first rank or,
// where hosts have folders apart, by those of a host together.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "checkpoint/rank_files.h"
#include "dsengine/checkpoint.h"
#include "model/checkpoint/host_folders.h"
#include "model/state/model_state.h"
#include "zero/partition.h"

namespace ds::engine {

// A piece and the live tensor it is a part of: flat, on any device. A tensor of a bucket may have memory only within
// use_bucket(), so it is cut there.
struct StatePiece {
  static constexpr size_t kNoBucket = std::numeric_limits<size_t>::max();
  checkpoint::PlannedPiece plan;
  at::Tensor flat;
  int64_t position = 0;  // first element in `flat`
  at::Tensor values() const { return flat.narrow(0, position, plan.length); }
  size_t bucket = kNoBucket;  // trainable ones, then frozen ones
};

// A run of elements of one flat tensor: a bucket's elements [begin, end), of which the tensor holds those from `first`
// on.
struct BucketRange {
  int64_t first = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

// Returns the range of a bucket that this rank holds; of a trainable bucket, the range of master and optimizer states
// (begin to end, first = begin).
BucketRange held_range(const ModelState& state, size_t bucket, bool partitioned);

// Calls `use` for each run of a parameter inside the range: its segment, cut to the range, and the first element of it
// in the tensor.
void for_each_run(const zero::BucketLayout& layout, const BucketRange& range,
                  const std::function<void(const Segment& run, int64_t position)>& use);

// Returns all pieces of weights, their averages, optimizer states and frozen parameters that this rank is to write.
// Where hosts have folders apart, what several ranks hold is divided among those of a host, so that each folder has all
// that its ranks need.
std::vector<StatePiece> state_pieces(const ModelState& state, const HostFolders& folders, bool with_frozen);

// Calls `use` while slice, master and states of a bucket are in memory. `changes`: what it writes there is kept.
void use_bucket(const ModelState& state, size_t bucket, bool changes, const std::function<void()>& use);

}  // namespace ds::engine
