// ZeRO-3: parameters are whole only while operators read them.
//
// Every rank keeps its slice of each bucket. Before an operator reads a parameter whose bucket is released, the
// bucket's memory is taken and filled by an all_gather; it is given back once the pass has moved on. The order of use
// is recorded in one pass and prefetched in the next (Rajbhandari et al., ZeRO-Infinity, arXiv:2104.07857,
// section 6.2), as DeepSpeed does per module: here an operator is what uses a parameter, so modules need no hooks and
// no declarations.
//
// A bucket that is not sharded (persistent parameters) stays whole: gathered after an update, waited for at first use.
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

// What is gathered ahead of use.
struct PrefetchRules {
  using Named = std::map<size_t, std::vector<size_t>>;
  bool in_backward = true;  // what follows in the order of the last pass, in backward too
  // A bucket, and those that are fetched when it is used, in place of what follows in that order.
  Named forward;
  Named backward;
};

// Collectives start on a communicator in an order that follows from the operators alone: ranks that run different
// ones meet in different all_gathers, and communicators that compare labels name the parameters each wanted.
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
// What an operator changes in place, outside of a scope, goes to the slices when the bucket is released
// (LiveBuckets::take_changed); all ranks make the same change.
//
// A rank without memory for a bucket cannot go on, and takes part in no gather from then on: what an operator was about
// to read has no elements, so that the operator fails in its own check of shapes, and the next call from the engine and
// every later one throw a ConfigError that says what is missing. Other ranks get a CommError once this one has left.
//
// Autocast keeps a cast copy of each weight until the next backward. Without a graph that needs it, it would collect
// the whole model: its cache is off for operators that read sliced parameters while gradients are.
class ParameterGatherer : public ParameterAccess {
 public:
  // Trainable and frozen ones. All outlive the gatherer.
  ParameterGatherer(const std::vector<ParameterBucket*>& buckets, GatherRoutes routes, GatherLimits limits);
  // Waits for what is on its way. Sharded parameters lose their elements: read them before.
  ~ParameterGatherer() override;

  void begin_backward(bool update_follows) override;
  void end_backward() override;
  void end_pass() override;
  void updated(size_t bucket) override;
  void end_update() override;
  void change_mode() override;
  void wait_all() override;
  void use_from_this_thread() override;

  // Makes a bucket whole until as many calls of drop(), beside any pass, with exact values (but for those of an encoded
  // bucket). gather() is collective and throws CommError.
  void gather(size_t bucket);
  void drop(size_t bucket);
  // Of a gathered bucket: the parameters were changed, on every rank alike.
  void keep_changes(size_t bucket);
  // Of a gathered bucket: what was changed is lost with the next drop().
  void forget_changes(size_t bucket) { buckets_[bucket].changes.begin(*buckets_[bucket].bucket); }

  // Releases what the program has changed in place, and says what it has changed since the last call.
  std::vector<LiveBuckets::Changed> take_changed();
  // Before slices take over what the program has changed in place (LiveBuckets).
  void call_before_changes(std::function<void()> call) { buckets_.call_before_changes(std::move(call)); }

  // A bucket that is whole stays so until end_update() or reshard().
  void keep_in_pass(size_t bucket, bool keeps) { buckets_[bucket].stays = keeps; }
  // In backward: one that is whole stays so until it is used in forward, or reshard().
  void keep_after_backward(size_t bucket) { buckets_[bucket].waits = true; }
  void prefetch_by(PrefetchRules rules) { rules_ = std::move(rules); }
  // Gives a bucket back that no scope holds: the slices are about to change, or the pass has done with it.
  void reshard(size_t bucket);
  bool is_whole(size_t bucket) const { return !buckets_[bucket].released(); }
  // What a parameter says that is read after the gatherer's end, after its name.
  void tell_at_end(std::string text) { end_text_ = std::move(text); }
  int64_t live_elements() const { return buckets_.live_elements(); }

  // Between steps: gives back the memory that is kept from one gather to the next.
  void release_memory();
  // Of all gathers since the last call, in their order: the same on ranks that ran the same operators.
  uint64_t take_gather_digest() { return buckets_.take_digest(); }
  // Most elements that were gathered at once since the last call.
  int64_t take_peak_elements();

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
  comm::Communicator& communicator_;  // of slices
  comm::Communicator* node_;
  GatherLimits limits_;
  ReuseRule reuse_;
  PrefetchRules rules_;
  std::string end_text_;
  size_t current_ = 0;  // used last
  bool in_backward_ = false;
  bool cast_cache_off_ = false;  // turned off here
  at::Tensor meeting_;           // what meet() sends
  comm::Work met_;
  OpInterceptor interceptor_;
};

}  // namespace ds::zero
