// What a pass gathers and releases as it moves from bucket to bucket. The order of use is recorded in one pass and
// prefetched in the next (Rajbhandari et al., ZeRO-Infinity, arXiv:2104.07857, section 6.2), as DeepSpeed does per
// module.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "dsengine/memory.h"
#include "zero/gather/live_buckets.h"
#include "zero/gather/reuse_rule.h"

namespace ds::zero {

// Which buckets are gathered ahead of their use.
struct PrefetchRules {
  using Named = std::map<size_t, std::vector<size_t>>;
  bool in_backward = true;  // buckets are prefetched by the order of the last pass in backward too
  // For some buckets, the ones that are fetched when it is used, in place of those that follow in that order.
  Named forward;
  Named backward;
};

// Makes the bucket full that an operator uses, releases the ones that the pass has done with, and gathers ahead those
// that it uses next. Decides from the uses alone, so that ranks that run the same operators start the same gathers. Not
// thread safe.
class GatherSchedule {
 public:
  // `buckets` outlives it.
  GatherSchedule(LiveBuckets& buckets, const GatherLimits& limits);

  // Sets the rules for the uses from now on.
  void prefetch_by(PrefetchRules rules) { rules_ = std::move(rules); }
  // Says whether an update follows the running pass. Without one, the next pass can use what this one has gathered.
  void expect_update(bool follows) { reuse_.expect_update(follows); }
  // Notes that the pass uses the bucket, and makes it full for the operator under way. It stays released where there is
  // no memory.
  void use(size_t bucket);
  // Whether the sharded bucket is the one that the pass has used last.
  bool used_last(size_t bucket) const { return bucket == current_; }
  // Ends the pass: the next one is expected to use what it used.
  void end_pass();
  // Begins a pass that does not follow the one before.
  void restart() { reuse_.restart(); }

 private:
  void release_done();
  void make_room(int64_t elements);
  void prefetch();
  bool prefetch_named();
  void prefetch_slices();

  LiveBuckets& buckets_;
  GatherLimits limits_;
  ReuseRule reuse_;
  PrefetchRules rules_;
  size_t current_;  // the sharded bucket that was used last; as many as there are: none was
};

}  // namespace ds::zero
