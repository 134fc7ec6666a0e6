// Which buckets of parameters are whole on this rank, which are on their way, and what went wrong with them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "zero/gather/bucket_gather.h"
#include "zero/gather/change_watch.h"
#include "zero/gather_memory.h"
#include "zero/parameter_bucket.h"

namespace ds::zero {

// Of ranks that issued different collectives at stage 3: `error` with what to do about it; any other one as it is.
std::exception_ptr with_way_out(const std::exception_ptr& error);

// A bucket goes from released to coming (fetch), to whole (wait), to released. One that is not sharded is whole, but
// for the time of a refresh(). Not thread safe.
//
// What fails while an operator waits cannot be thrown (LibTorch only logs what its callbacks throw): it is kept, and
// thrown by rethrow(). The memory of a failed gather holds NaN, and its parameters
// throw when they are read. Where there is no memory, the bucket stays released
// and no gather is begun any more: other ranks have gone on with theirs.
class LiveBuckets {
 public:
  enum class State : uint8_t { kReleased, kComing, kWhole };
  struct Entry {
    ParameterBucket* bucket = nullptr;
    std::string label;
    State state = State::kReleased;
    GatherUnderWay gather;  // while kComing
    ChangeWatch changes;    // since it was gathered
    uint64_t used_by = 0;   // outermost operator that read it last
    int held = 0;           // scopes that need it whole
    bool exact = true;      // was gathered without loss
    bool stays = false;     // once it is whole, until the pass ends
    bool waits = false;     // likewise, until it is used in forward
    bool named = false;     // was fetched ahead because the program said so, until it is used

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

  // Elements of all sharded buckets; of those that are coming or whole; of those that are coming.
  int64_t sharded_elements() const { return sharded_; }
  int64_t live_elements() const { return live_; }
  int64_t coming_elements() const { return coming_; }
  // Most that were live since the last call.
  int64_t take_peak_elements();

  // Begins the gather of a released bucket. Collective, as refresh().
  void fetch(size_t bucket, bool exact = false);
  // Begins the gather of a bucket that is not sharded, from what ranks have updated. Throws CommError.
  void refresh(size_t bucket);
  void wait(size_t bucket);
  void wait_all();
  // Of a whole, sharded bucket that no scope holds.
  void release(size_t bucket);
  // Waits first; but for those that a scope holds.
  void release_all();
  // Gives back memory that is kept from one gather to the next: what was not needed lately, or all of it.
  void lend_memory() { memory_.lend_to_kernel(); }
  void free_memory() { memory_.clear(); }

  // Of the buckets whose gathers were begun since the last call, in their order: ranks of `routes.slices` that have the
  // same one have met in the same gathers.
  uint64_t take_digest() { return std::exchange(digest_, 0); }

  bool out_of_memory() const { return no_memory_ != nullptr; }
  bool failed() const { return failure_ != nullptr || out_of_memory(); }
  // Buckets whose parameters the program has changed in place since the last call, with a digest of what they then held
  // (zero/value_digest.h): their slices have the new values.
  struct Changed {
    size_t bucket = 0;
    std::string parameter;  // one of those
    uint64_t digest = 0;
  };
  std::vector<Changed> take_changed() { return std::exchange(changed_, {}); }
  // Called before slices take such values over: somebody may read them on another thread. Empty: nobody.
  void call_before_changes(std::function<void()> call) { before_changes_ = std::move(call); }
  // For rethrow(), unless there is an error already. Null: none.
  void keep_error(const std::exception_ptr& error);
  // Throws what was kept: once; that there was no memory each time.
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
  int rank_;  // of slices
  std::vector<Changed> changed_;
  std::function<void()> before_changes_;
  std::exception_ptr failure_;
  std::exception_ptr no_memory_;
};

}  // namespace ds::zero
