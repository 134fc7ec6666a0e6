// The buckets of parameters as this rank has them: which are released, which are on their way, which are full; what was
// changed in them, and what went wrong.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "zero/gather/bucket_gather.h"
#include "zero/gather/parameter_access.h"
#include "zero/gather_memory.h"
#include "zero/parameter_bucket.h"

namespace ds::zero {

// Notices changes in place of the parameters of one bucket that is gathered for operators. A change is known from an
// operator's schema, which sees changes through .data() too, although that has a version counter of its own; from
// version counters, where an operator is not seen. Not thread safe.
class ChangeWatch {
 public:
  // Begins anew: the values that the parameters hold now count as unchanged.
  void begin(const ParameterBucket& bucket);
  // Notes that an operator is about to change a tensor that lies in the bucket.
  void note() { noted_ = true; }
  // Whether anything has changed since begin(), and the name of a parameter that has: the first, where only an operator
  // tells.
  bool found(const ParameterBucket& bucket) const { return noted_ || changed_version(bucket) < versions_.size(); }
  std::string name(const ParameterBucket& bucket) const;

 private:
  size_t changed_version(const ParameterBucket& bucket) const;

  std::vector<int64_t> versions_;  // the version counters of the parameters
  bool noted_ = false;
};

// Whether a tensor shows a parameter or begins inside of it.
bool is_part_of(const at::Tensor& tensor, const Parameter& parameter);

// Returns `error` with advice added, where it says that ranks issued different collectives; any other error as it is.
std::exception_ptr add_advice(const std::exception_ptr& error);

// Note [What keeps a bucket full]
// A sharded bucket is released once the pass has moved on from it. These keep it full:
//   held         scopes have it: from ParameterGatherer::gather() until as many drop()s
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
// A failure while an operator waits cannot be thrown (LibTorch only logs what its callbacks throw): it is kept, and
// thrown by rethrow(). The memory of a failed gather holds NaN, and its parameters throw when they are read. Where
// there is no memory, the bucket stays released and no gather is begun any more: other ranks have gone on with theirs.
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
    int64_t elements() const { return bucket->layout().numel; }
  };

  // All outlive it. `max_live`: GatherLimits::max_live, for messages.
  LiveBuckets(const std::vector<ParameterBucket*>& buckets, const GatherRoutes& routes, int64_t max_live);

  size_t size() const { return entries_.size(); }
  Entry& operator[](size_t bucket) { return entries_[bucket]; }
  const Entry& operator[](size_t bucket) const { return entries_[bucket]; }
  std::vector<Entry>::iterator begin() { return entries_.begin(); }
  std::vector<Entry>::iterator end() { return entries_.end(); }

  // The number of elements of all sharded buckets; of those that are coming or full; of those that are coming.
  int64_t sharded_elements() const { return sharded_; }
  int64_t live_elements() const { return live_; }
  int64_t coming_elements() const { return coming_; }
  // The largest live_elements() since the last call.
  int64_t take_peak_elements();

  // Begins the gather of a released bucket. Collective, as refresh().
  void fetch(size_t bucket, bool exact = false);
  // Begins the gather of a bucket that is not sharded, from what ranks have updated. Throws CommError.
  void refresh(size_t bucket);
  // Waits for the bucket's gather, if one is under way. Failures are kept for rethrow().
  void wait(size_t bucket);
  void wait_all();
  // Releases a full, sharded bucket that no scope holds.
  void release(size_t bucket);
  // Waits for all gathers, then releases all sharded buckets but those that a scope holds.
  void release_all();
  // Gives back memory that is kept from one gather to the next: what was not needed lately, or all of it.
  void lend_memory() { memory_.lend_to_kernel(); }
  void free_memory() { memory_.clear(); }

  // A digest of the buckets whose gathers were begun since the last call, in their order: ranks of `routes.slices` with
  // equal digests have met in the same gathers.
  uint64_t take_digest() { return std::exchange(digest_, 0); }

  bool out_of_memory() const { return no_memory_ != nullptr; }
  bool failed() const { return failure_ != nullptr || out_of_memory(); }
  // The changes in place by the program since the last call.
  std::vector<ChangedBucket> take_changed() { return std::exchange(changed_, {}); }
  // Has `call` called before slices take over changed values: somebody may read the slices on another thread. Empty: no
  // call.
  void call_before_changes(std::function<void()> call) { before_changes_ = std::move(call); }
  // Keeps an error for rethrow(), unless there is one already. Null: does nothing.
  void keep_error(const std::exception_ptr& error);
  // Throws the error that was kept, once; the error that there was no memory, in every call.
  void rethrow();

 private:
  void start(size_t bucket, bool exact);
  bool allocate(const Entry& entry);
  void fail(const Entry& entry);
  void keep_changes(size_t bucket);

  std::vector<Entry> entries_;
  GatherMemory memory_;
  BucketGather gathers_;  // ends before what it copies to
  int64_t max_live_;
  int64_t sharded_ = 0;
  int64_t live_ = 0;
  int64_t coming_ = 0;
  int64_t peak_ = 0;
  uint64_t digest_ = 0;
  int rank_;  // this rank among the owners of slices
  std::vector<ChangedBucket> changed_;
  std::function<void()> before_changes_;
  std::exception_ptr failure_;
  std::exception_ptr no_memory_;
};

}  // namespace ds::zero
