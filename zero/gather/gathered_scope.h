// The contents of a scope of gathered parameters: the engine fills it in, zero::GatheredParameters opens it.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "dsengine/comm.h"
#include "dsengine/zero.h"
#include "zero/gather/held_buckets.h"
#include "zero/gather/split_wholes.h"
#include "zero/parameter_bucket.h"

namespace ds::zero {

struct GatheredParameters::Scope {
  std::vector<std::pair<size_t, ParameterBucket*>> buckets;  // with their numbers, ascending
  std::vector<Parameter> others;                             // in no bucket, full on every rank
  HeldBuckets* held = nullptr;                               // null: all parameters are full already
  comm::Communicator* world = nullptr;                       // all ranks that hold parts or copies
  std::optional<int> modifier_rank;                          // a rank of `world`
  // Called before a bucket is released that is full and the same on all ranks, and may have new values.
  std::function<void(size_t)> changed;
  std::function<void()> closed;         // always, once
  std::unique_ptr<SplitWholes> wholes;  // null: no parameter is split over a tensor axis
};

}  // namespace ds::zero
