// Buckets that are full because somebody holds them, beside any pass: a scope of gathered parameters, a checkpoint.
#pragma once

#include <cstddef>

#include "zero/gather/live_buckets.h"

namespace ds::zero {

// Makes buckets full for whoever reads or changes their parameters, and keeps them so until the last one drops them.
// Not thread safe.
class HeldBuckets {
 public:
  // `rank`: this rank among the owners of slices. `buckets` outlives it.
  HeldBuckets(LiveBuckets& buckets, int rank) : buckets_(buckets), rank_(rank) {}

  // Makes a bucket full until drop() was called as often, with exact values (but for an encoded bucket, which has no
  // others than its own). Collective; throws CommError.
  void gather(size_t bucket);
  void drop(size_t bucket);
  // Copies the parameters of a bucket that gather() has made full to the slices: they were changed, on every rank
  // alike.
  void keep_changes(size_t bucket);
  // Has the slice of a bucket take over what operators have changed in place, whoever holds the bucket full, so that
  // somebody may read the slice.
  void publish_changes(size_t bucket) { buckets_.keep_changes(bucket); }
  // Ignores changes of the parameters of such a bucket, which are lost with the last drop().
  void forget_changes(size_t bucket) { buckets_[bucket].changes.begin(*buckets_[bucket].bucket); }

 private:
  LiveBuckets& buckets_;
  int rank_;
};

}  // namespace ds::zero
