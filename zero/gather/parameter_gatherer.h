// ZeRO-3: parameters are full (unsharded) only while operators read them.
//
// Every rank keeps its slice of each bucket. Before an operator reads a parameter whose bucket is released, the
// bucket's memory is taken and filled by an all_gather; it is given back once the pass has moved on. The order of use
// is recorded in one pass and prefetched in the next (Rajbhandari et al., ZeRO-Infinity, arXiv:2104.07857,
// section 6.2), as DeepSpeed does per module: here an operator is what uses a parameter, so modules need no hooks and
// no declarations.
//
// A bucket that is not sharded (persistent parameters) stays full: it is gathered after an update, and waited for at
// its first use. What else keeps a bucket full: Note [What keeps a bucket full] (zero/gather/live_buckets.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/op_interceptor.h"
#include "dsengine/comm.h"
#include "dsengine/memory.h"
#include "zero/gather/bucket_gather.h"
#include "zero/gather/live_buckets.h"
#include "zero/gather/parameter_access.h"
#include "zero/gather/reuse_rule.h"
#include "zero/parameter_bucket.h"

namespace ds::zero {

// Which buckets are gathered ahead of their use.
struct PrefetchRules {
  using Named = std::map<size_t, std::vector<size_t>>;
  bool in_backward = true;  // buckets are prefetched by the order of the last pass in backward too
  // For some buckets, the ones that are fetched when it is used, in place of those that follow in that order.
  Named forward;
  Named backward;
};

// Makes the parameters of a bucket full before an operator reads them, and releases them afterwards.
//
// Collectives start on a communicator in an order that follows from the operators alone: ranks that run different
// operators meet in different all_gathers, and communicators that compare labels name the parameters that each wanted.
//
// Passes end together: a rank that runs fewer operators than others is found at the start of backward or at its end. On
// a device communicators compare nothing: all_gathers of different buckets of one size would go on with wrong weights.
// There ranks meet once a step, at the start of its last backward where that is known, and step() compares what they
// gathered (take_gather_digest()). Where sizes or numbers of gathers differ, peers may hang before; the flight record
// says where each of them is.
//
// Parameters of a failed gather throw where an operator reads them (views of them hold NaN), and so does the next call
// from the engine.
//
// A change in place by an operator, outside of a scope, goes to the slices when the bucket is released
// (LiveBuckets::take_changed); all ranks make the same change.
//
// A rank without memory for a bucket cannot go on, and takes part in no gather from then on: the tensor that an
// operator was about to read has no elements, so that the operator fails in its own check of shapes, and the next call
// from the engine and every later one throw a ConfigError that says what is missing. Other ranks get a CommError once
// this one has left.
//
// Autocast keeps a cast copy of each weight until the next backward. Without a graph that needs the copies, it would
// collect the whole model: its cache is off for operators that read sliced parameters while gradients are.
class ParameterGatherer : public ParameterAccess {
 public:
  // `buckets`: those of trainable and of frozen parameters. They and the groups of `routes` outlive the gatherer.
  ParameterGatherer(const std::vector<ParameterBucket*>& buckets, GatherRoutes routes, GatherLimits limits);
  // Waits for gathers under way. Sharded parameters lose their elements: read them before.
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
  uint64_t take_gather_digest() override { return buckets_.take_digest(); }
  int64_t take_peak_elements() override;
  std::vector<ChangedBucket> take_changed() override;
  void call_before_changes(std::function<void()> call) override { buckets_.call_before_changes(std::move(call)); }

  // Makes a bucket full until drop() was called as often, beside any pass, with exact values (but for an encoded
  // bucket, which has no others than its own). gather() is collective and throws CommError.
  void gather(size_t bucket);
  void drop(size_t bucket);
  // Copies the parameters of a bucket that gather() has made full to the slices: they were changed, on every rank
  // alike.
  void keep_changes(size_t bucket);
  // Ignores changes of the parameters of such a bucket, which are lost with the last drop().
  void forget_changes(size_t bucket) { buckets_[bucket].changes.begin(*buckets_[bucket].bucket); }

  // With `keeps`, a bucket that is full stays so until end_update() or reshard().
  void keep_in_pass(size_t bucket, bool keeps) { buckets_[bucket].stays = keeps; }
  // Called in backward: if the bucket is full, it stays so until it is used in forward, or reshard().
  void keep_after_backward(size_t bucket) { buckets_[bucket].waits = true; }
  void prefetch_by(PrefetchRules rules) { rules_ = std::move(rules); }
  // Releases the bucket, unless a scope holds it: its slices are about to change, or the pass has done with it.
  void reshard(size_t bucket);
  bool is_whole(size_t bucket) const { return !buckets_[bucket].released(); }
  // Sets the end of the error message for a parameter that is read after the gatherer was destroyed: "parameter NAME
  // ... was read after TEXT".
  void tell_at_end(std::string text) { end_text_ = std::move(text); }
  int64_t live_elements() const { return buckets_.live_elements(); }

 private:
  bool sees_operators() const;
  void before_read(const at::Tensor& tensor);
  void choose_cast_cache(bool on);
  void use(size_t bucket);
  bool can_be_released(size_t bucket) const;
  void release_done();
  void make_room(int64_t elements);
  void prefetch();
  bool prefetch_named();
  void prefetch_slices();
  bool meets_in_every_pass() const { return meeting_.is_cpu(); }
  void meet(const char* where);
  void wait_for_others();

  LiveBuckets buckets_;
  std::unordered_map<const void*, size_t> bucket_of_storage_;
  comm::Communicator& communicator_;  // the ranks that own slices
  comm::Communicator* node_;
  GatherLimits limits_;
  ReuseRule reuse_;
  PrefetchRules rules_;
  std::string end_text_;
  size_t current_ = 0;  // used last
  bool in_backward_ = false;
  bool cast_cache_off_ = false;  // turned off here
  at::Tensor meeting_;           // the tensor that meet() sends
  comm::Work met_;
  OpInterceptor interceptor_;
};

}  // namespace ds::zero
