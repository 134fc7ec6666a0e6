// ZeRO-3: parameters are full (unsharded) only while operators read them.
//
// Every rank keeps its slice of each bucket. Before an operator reads a parameter whose bucket is released, memory for
// the bucket is allocated and filled by an all_gather; it is released once the pass has moved on. Operators trigger the
// gather, not modules; so modules need no hooks and no declarations. On a GPU the current stream is ordered after the
// gather, and the host does not wait (BucketGather).
//
// A bucket that is not sharded (persistent parameters) stays full: it is gathered after an update, and waited for at
// its first use. What else keeps a bucket full: Note [What keeps a bucket full] (zero/gather/live_buckets.h).
//
// The bucket of a row-wise table (BucketLayout::row_width) stays released when an operator reads it: its layers get the
// rows that they name (RowReads), and all else an error. Scopes gather it, and so do views that were made in a scope.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/op_interceptor.h"
#include "dsengine/comm.h"
#include "dsengine/memory.h"
#include "zero/gather/bucket_gather.h"
#include "zero/gather/gather_schedule.h"
#include "zero/gather/held_buckets.h"
#include "zero/gather/live_buckets.h"
#include "zero/gather/parameter_access.h"
#include "zero/parameter_bucket.h"

namespace ds::zero {

// Autocast's cache of cast weights on one thread. Autocast keeps a cast copy of each weight until the next backward.
// While gradients are off nobody needs these copies, and at stage 3 they would add up to the whole model. So the cache
// is then off for operators that read sliced parameters. Not thread safe.
class CastCache {
 public:
  // Turns the cache of this thread on or off. It is left alone where somebody else has turned it off.
  void choose(bool on);

 private:
  bool turned_off_ = false;  // by choose()
};

// A collective of one element at which all ranks meet between gathers. A rank that ran fewer operators is here while
// another still gathers a bucket; communicators that compare labels then name both. Not thread safe.
class RankMeeting {
 public:
  // The groups of `routes` outlive it. `options`: dtype and device of the one element.
  RankMeeting(const GatherRoutes& routes, const at::TensorOptions& options);

  // Whether ranks meet in every pass. On a device, whose communicators compare nothing, they meet before updates only.
  bool is_in_every_pass() const { return sent_.is_cpu(); }
  // Waits for the last meeting and begins the next one. `where` is its label. Collective; throws CommError for either.
  void begin(const char* where);
  // Waits until all ranks have begun the last meeting. Throws CommError.
  void wait();

 private:
  comm::Communicator& ranks_;  // those that own slices
  comm::Communicator* node_;
  at::Tensor sent_;
  comm::Work met_;
};

// Makes the parameters of a bucket full before an operator reads them, and releases them afterwards. The overridden
// methods and the thread that calls them are described in ParameterAccess.
//
// This class intercepts operators; GatherSchedule decides what is gathered and released, and LiveBuckets does it. The
// order of all_gathers depends only on the operators that a rank runs. So ranks that run different operators call
// different all_gathers at the same time. A communicator that compares labels then throws, and its message names the
// parameters that each rank wanted.
//
// All ranks meet when a backward begins and when it ends (RankMeeting), so a rank that ran fewer operators is found
// there at the latest. On a device communicators compare no labels, so two all_gathers of different buckets of one size
// would pair up and give wrong weights. There ranks meet once a step, at the start of its last backward where that is
// known, and step() compares digests of the gathers (take_gather_digest()). If sizes or counts of gathers differ, ranks
// may hang before that; the flight record then says where each one is.
//
// Parameters of a failed gather throw where an operator reads them (views of them hold NaN), and so does the next call
// from the engine.
//
// A change in place by an operator, outside of a scope, goes to the slices when the bucket is released
// (InPlaceChanges::take_over); all ranks make the same change.
//
// A rank that cannot allocate a bucket joins no further gather. The operator fails its shape check, because the tensor
// is empty; every later call of the engine throws a ConfigError that says what is missing. Other ranks get a CommError
// once this one has left.
class ParameterGatherer : public ParameterAccess {
 public:
  // The `end_text` for parameters of an engine.
  static constexpr const char* kEndOfEngine =
      "the end of its engine: at stage 3 ranks had slices of it, which have gone with the engine. Take "
      "engine->module_state_dict() before";

  // `buckets`: those of trainable and of frozen parameters. They and the groups of `routes` outlive the gatherer.
  // `end_text`: the end of the error message for a parameter that is read after the gatherer was destroyed: "parameter
  // NAME or one beside it was read after TEXT". Throws UsageError where this thread has at::RecordFunction disabled.
  ParameterGatherer(const std::vector<ParameterBucket*>& buckets, GatherRoutes routes, GatherLimits limits,
                    std::string end_text = kEndOfEngine);
  // Waits for gathers under way, and logs their errors. Sharded parameters lose their elements: read them before.
  ~ParameterGatherer() override;

  void begin_backward(bool update_follows) override;
  void end_backward() override;
  void end_pass() override;
  void updated(size_t bucket) override;
  void end_update() override;
  void change_mode() override;
  void wait_all() override;
  void use_from_this_thread() override;
  void release_memory() override;
  int64_t take_peak_elements() override { return buckets_.take_peak_elements(); }
  std::vector<ChangedBucket> take_changed() override;
  void call_before_changes(std::function<void()> call) override { buckets_.changes().call_before(std::move(call)); }
  // Returns a digest of all gathers since the last call, in their order: equal on ranks that ran the same operators.
  uint64_t take_gather_digest() { return buckets_.take_digest(); }

  // The buckets that scopes hold full, whatever passes do.
  HeldBuckets& held() { return held_; }
  // All buckets, read only.
  const LiveBuckets& buckets() const { return buckets_; }

  // With `keeps`, passes do not release the bucket once it is full, until this is called with false. The end of an
  // update, reshard(), release_memory(), changes in place and GatherLimits::max_live release it all the same.
  void keep_in_pass(size_t bucket, bool keeps) { buckets_[bucket].stays = keeps; }
  // Called in backward: once full, the bucket is not released before its next use in forward. The calls and the limit
  // that keep_in_pass() names release it all the same.
  void keep_after_backward(size_t bucket) { buckets_[bucket].waits = true; }
  // Sets which buckets are gathered ahead, from the next use on.
  void prefetch_by(PrefetchRules rules) { schedule_.prefetch_by(std::move(rules)); }
  // Releases the bucket, unless a scope holds it: its slices are about to change, or the pass has done with it.
  void reshard(size_t bucket);

 private:
  void before_read(const at::Tensor& tensor);

  LiveBuckets buckets_;
  HeldBuckets held_;
  GatherSchedule schedule_;
  std::unordered_map<const void*, size_t> bucket_of_storage_;
  comm::Communicator& communicator_;  // the ranks that own slices
  bool sees_operators_;               // operators may have to wait for what they read
  std::string end_text_;
  bool in_backward_ = false;
  CastCache cast_cache_;
  RankMeeting meeting_;
  OpInterceptor interceptor_;
};

}  // namespace ds::zero
