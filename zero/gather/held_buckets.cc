#include "zero/gather/held_buckets.h"

#include <ATen/record_function.h>

#include "core/check.h"

namespace ds::zero {

void HeldBuckets::gather(size_t bucket) {
  LiveBuckets::Entry& entry = buckets_[bucket];
  buckets_.wait(bucket);
  if (entry.whole() && !entry.exact) buckets_.release(bucket);
  if (entry.released()) buckets_.fetch(bucket, /*exact=*/true);
  buckets_.wait(bucket);
  if (buckets_.errors().failed() && entry.can_be_released()) buckets_.release(bucket);
  buckets_.errors().rethrow();
  ++entry.held;
}

void HeldBuckets::drop(size_t bucket) {
  LiveBuckets::Entry& entry = buckets_[bucket];
  ensure(entry.held > 0, "a bucket is dropped as often as it was gathered");
  if (--entry.held > 0) return;
  if (entry.can_be_released()) buckets_.release(bucket);
  buckets_.errors().rethrow();
}

void HeldBuckets::keep_changes(size_t bucket) {
  LiveBuckets::Entry& entry = buckets_[bucket];
  ensure(entry.held > 0 && entry.whole(), "only a gathered bucket keeps changes");
  if (!entry.sharded()) return;
  const at::RecordFunctionGuard not_intercepted(/*is_enabled=*/false);
  entry.bucket->keep_changes(rank_);
  entry.bucket->drop_secondary();
  entry.changes.begin(*entry.bucket);
}

}  // namespace ds::zero
