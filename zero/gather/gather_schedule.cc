#include "zero/gather/gather_schedule.h"

#include <torch/csrc/autograd/graph_task.h>

#include "core/op_interceptor.h"

namespace ds::zero {
namespace {

std::vector<int64_t> elements_of(const LiveBuckets& buckets) {
  std::vector<int64_t> elements;
  for (size_t b = 0; b < buckets.size(); ++b) elements.push_back(buckets[b].elements());
  return elements;
}

// Whether the bucket can be released and is not used by the operator under way, which may read it again in operators
// that it calls.
bool is_done(const LiveBuckets::Entry& entry) {
  return entry.can_be_released() && entry.used_by != OpInterceptor::outermost_operator();
}

}  // namespace

GatherSchedule::GatherSchedule(LiveBuckets& buckets, const GatherLimits& limits)
    : buckets_(buckets),
      limits_(limits),
      reuse_(elements_of(buckets), limits.max_reuse_distance),
      current_(buckets.size()) {}

void GatherSchedule::use(size_t bucket) {
  LiveBuckets::Entry& entry = buckets_[bucket];
  entry.named = false;
  if (entry.sharded()) {
    current_ = bucket;
    reuse_.use(bucket);
    // Prefetched for an order that does not hold.
    if (!reuse_.following() && buckets_.counts().coming > 0) buckets_.wait_all();
    release_done();
    if (entry.released()) {
      make_room(entry.elements());
      // Gathers that are under way hold the memory in which slices are read.
      for (size_t b = 0; b < buckets_.size() && !entry.bucket->kept_slice().has_room(); ++b) buckets_.wait(b);
      buckets_.fetch(bucket);
    }
  }
  buckets_.wait(bucket);
  prefetch();
}

void GatherSchedule::end_pass() {
  reuse_.end_pass();
  current_ = buckets_.size();
}

// Releases the buckets that the pass has done with.
void GatherSchedule::release_done() {
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const LiveBuckets::Entry& entry = buckets_[b];
    const bool kept = entry.stays || entry.waits || entry.named;
    if (is_done(entry) && !kept && !reuse_.stays(b)) buckets_.release(b);
  }
}

// Releases the bucket that is used last of all, or was used longest ago, until `elements` fit under the limit.
void GatherSchedule::make_room(int64_t elements) {
  while (buckets_.counts().live + elements > limits_.max_live) {
    size_t victim = buckets_.size();
    int64_t furthest = -1;
    for (size_t b = 0; b < buckets_.size(); ++b) {
      if (!is_done(buckets_[b])) continue;
      const int64_t distance = reuse_.distance(b);
      if (distance <= furthest) continue;
      furthest = distance;
      victim = b;
    }
    if (victim == buckets_.size()) return;  // the operator's own: it cannot run with less
    buckets_.release(victim);
  }
}

// Prefetches the buckets that the program has named to follow the one in use. Returns whether it has named any.
bool GatherSchedule::prefetch_named() {
  if (current_ == buckets_.size()) return false;
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  const PrefetchRules::Named& named = in_backward ? rules_.backward : rules_.forward;
  const auto found = named.find(current_);
  if (found == named.end()) return in_backward && !rules_.in_backward;
  for (const size_t bucket : found->second) {
    if (!buckets_[bucket].released()) continue;
    buckets_.fetch(bucket);
    buckets_[bucket].named = true;
  }
  return true;
}

void GatherSchedule::prefetch() {
  if (buckets_.counts().live == buckets_.counts().sharded || prefetch_named()) return;
  for (const size_t bucket : reuse_.upcoming()) {
    if (buckets_.counts().coming >= limits_.prefetch || buckets_.errors().out_of_memory()) break;
    const LiveBuckets::Entry& entry = buckets_[bucket];
    if (!entry.released()) continue;
    if (buckets_.counts().live + entry.elements() > limits_.max_live || !entry.bucket->kept_slice().has_room()) break;
    buckets_.fetch(bucket);
  }
  if (!buckets_.errors().out_of_memory()) prefetch_slices();
}

// Prefetches the slice of the next bucket, so that it is in memory when its gather starts.
void GatherSchedule::prefetch_slices() {
  for (const size_t bucket : reuse_.upcoming()) {
    const LiveBuckets::Entry& entry = buckets_[bucket];
    if (!entry.released()) continue;
    if (!entry.bucket->secondary().defined()) entry.bucket->kept_slice().prefetch();
    return;
  }
}

}  // namespace ds::zero
