// The buckets of parameters as this rank has them: which are released, which are on their way, which are full.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "zero/gather/bucket_gather.h"
#include "zero/gather/gather_errors.h"
#include "zero/gather/in_place_changes.h"
#include "zero/gather_memory.h"
#include "zero/parameter_bucket.h"

namespace ds::zero {

// Note [What keeps a bucket full]
// A sharded bucket is released once the pass has moved on from it. These keep it full:
//   held         scopes have it: from HeldBuckets::gather() until as many drop()s
//   the operator that read it last (used_by) is still running, and may read it again
//   stays        the program asked for it (keep_in_pass()): until end_update() or reshard()
//   waits        the program asked for it after backward (keep_after_backward()): until forward uses it, or reshard()
//   named        it was prefetched because PrefetchRules name it: until it is used, or reshard()
//   ReuseRule    it is used again soon, by the order of the last pass, or was one of the last two buckets to be used
// Where GatherLimits::max_live would be exceeded, only the first two keep it. An update, reshard() and the like release
// everything but what is held.

// A bucket goes from released to coming (fetch), to full (wait), to released; kWhole is the state of a full one. A
// bucket that is not sharded is always full, but for the time of a refresh(). Not thread safe.
//
// A failure while an operator waits is kept in errors(). The memory of a failed gather holds NaN, and its parameters
// throw when they are read. Where there is no memory, the bucket stays released and no gather is begun any more: other
// ranks have gone on with theirs.
class LiveBuckets {
 public:
  enum class State : uint8_t { kReleased, kComing, kWhole };
  struct Entry {
    ParameterBucket* bucket = nullptr;
    std::string label;
    State state = State::kReleased;
    GatherUnderWay gather;  // while kComing
    ChangeWatch changes;    // changes since it was gathered
    uint64_t used_by = 0;   // outermost operator that read it last
    int held = 0;           // number of scopes that need it full; for this and the flags below, see the note
    bool exact = true;      // it was gathered without loss
    bool stays = false;     // it is kept, once it is full, until the update
    bool waits = false;     // it is kept, once it is full, until forward uses it
    bool named = false;     // it was prefetched because the program said so, and is not used yet

    bool whole() const { return state == State::kWhole; }
    bool released() const { return state == State::kReleased; }
    bool sharded() const { return bucket->sharded(); }
    // Whether it is full and sharded, and no scope holds it.
    bool can_be_released() const { return whole() && sharded() && held == 0; }
    // Whether it is a table of which operators read rows (RowReads), and is not gathered for them.
    bool is_read_by_rows() const { return released() && sharded() && bucket->layout().row_width > 0; }
    int64_t elements() const { return bucket->layout().numel; }
  };
  // Numbers of elements of sharded buckets.
  struct Counts {
    int64_t sharded = 0;  // all of them
    int64_t live = 0;     // those that are coming or full
    int64_t coming = 0;   // those that are coming
    int64_t started = 0;  // gathers that were begun so far, no elements
  };

  // The buckets and the groups of `routes` outlive it. `max_live`: GatherLimits::max_live, for messages.
  LiveBuckets(const std::vector<ParameterBucket*>& buckets, const GatherRoutes& routes, int64_t max_live);
  LiveBuckets(const LiveBuckets&) = delete;
  LiveBuckets& operator=(const LiveBuckets&) = delete;

  size_t size() const { return entries_.size(); }
  Entry& operator[](size_t bucket) { return entries_[bucket]; }
  const Entry& operator[](size_t bucket) const { return entries_[bucket]; }
  const Counts& counts() const { return counts_; }
  // Returns the largest counts().live since the last call.
  int64_t take_peak_elements();

  // Begins the gather of a released bucket. Collective.
  void fetch(size_t bucket, bool exact = false);
  // Begins the gather of a bucket that is not sharded, from what ranks have updated. Collective; throws CommError.
  void refresh(size_t bucket);
  // Waits for the bucket's gather, if one is under way. Failures are kept in errors().
  void wait(size_t bucket);
  void wait_all();
  // Has the slice of a full, sharded bucket take over what was changed in place, if anything; the bucket stays full.
  void keep_changes(size_t bucket);
  // Releases a full, sharded bucket that no scope holds. Its slice takes over what was changed in place.
  void release(size_t bucket);
  // Waits for all gathers, then releases all sharded buckets but those that a scope holds.
  void release_all();
  // Gives back memory that is kept from one gather to the next: what was not needed lately, or all of it.
  void lend_memory() { memory_.lend_to_kernel(); }
  void free_memory() { memory_.clear(); }

  // Returns a digest of the buckets whose gathers were begun since the last call, in their order: ranks of
  // `routes.slices` with equal digests have met in the same gathers.
  uint64_t take_digest() { return std::exchange(digest_, 0); }

  // The errors of its gathers, for the engine's next call.
  GatherErrors& errors() { return errors_; }
  // The changes that slices have taken over.
  InPlaceChanges& changes() { return changes_; }

 private:
  void start(size_t bucket, bool exact);
  bool allocate(const Entry& entry);
  void fail(const Entry& entry);

  std::vector<Entry> entries_;
  GatherMemory memory_;
  BucketGather gathers_;  // ends before what it copies to
  int64_t max_live_;
  Counts counts_;
  int64_t peak_ = 0;  // the largest counts_.live
  uint64_t digest_ = 0;
  GatherErrors errors_;
  InPlaceChanges changes_;
};

}  // namespace ds::zero
