// The states of a bucket of gradients and of a backward pass, and their transitions. Torch-free.
#pragma once

#include <cstdint>

namespace ds::zero {

// Note [Life of a gradient bucket]
//
// A bucket has one buffer, `local`, and one sum. The state says what `local` holds:
//   empty        nothing that counts; where buckets stay (stages 0 and 1) the memory is kept for the next pass
//   collecting   gradients of this rank, of passes that were not reduced yet
//   in flight    what a collective runs on; in a group of one, or kept local, what is passed on as it is
//   reduced      in its own part the reduced gradient: the full bucket at stage 0, else this rank's slice
// The sum holds what was reduced before and had to make room: set aside on the device, or elsewhere (ReducedGradients).
//
//   event        who                                           empty        collecting   in flight   reduced
//   collect      a hook has a gradient                         collecting   collecting   -           -
//   launch       the bucket's turn in a pass that reduces,     in flight    in flight    -           -
//                or finish(); what has no gradient is zero
//   complete     whoever needs the result waits for it         -            -            reduced     -
//   set aside    the sum takes the result: stage 2 at once,    -            -            -           empty
//                before the next pass, elsewhere in finish()
//   drop         reset(), after completing what is in flight   empty        empty        -           empty
//   reopen       the next pass, where .grad is the program's   empty        collecting   -           collecting
//                and what it holds is reduced again
// A "-" is a defect of ours: InternalError. finish() adds a sum on the device to `local`, which stays reduced.
//
// A pass (one backward) has a state too:
//   idle         none runs, and all that buckets hold is launched
//   unreduced    none runs, and the last one was not reduced: finish() launches all buckets, on every rank alike
//   local        one runs that is not reduced: under no_sync, or at stages 0 and 1 before the boundary
//   reducing     one runs that launches each bucket as soon as it is its turn and its gradients are there
//   failed       the last one threw: only reset() helps
//   joined       finish() has begun to add the replicas' gradients: nothing can be added until reset()
//
//   event             function            idle       unreduced   local       reducing   failed   joined
//   begin local       begin_backward()    local      local       -           -          -        -
//   begin reducing    begin_backward()    reducing   reducing    -           -          -        -
//   end               end_backward()      -          -           unreduced   idle       -        -
//   fail              abandon_backward()  failed     failed      failed      failed     failed   -
//   finish            finish()            idle       idle        -           -          -        joined
//   join              finish()            joined     -           -           -          -        -
//   reset             reset()             idle       idle        -           -          idle     idle
// Where a "-" can be reached by a caller's order of calls, GradientReducer throws UsageError before it asks here. A
// pass fails also after its end, by what the engine does in it behind the reducer's part.

enum class BucketState : uint8_t { kEmpty, kCollecting, kInFlight, kReduced };
enum class BucketEvent : uint8_t { kCollect, kLaunch, kComplete, kSetAside, kDrop, kReopen };

enum class PassState : uint8_t { kIdle, kUnreduced, kLocal, kReducing, kFailed, kJoined };
enum class PassEvent : uint8_t { kBeginLocal, kBeginReducing, kEnd, kFail, kFinish, kJoin, kReset };

// Whether a backward pass runs.
constexpr bool is_running(PassState state) { return state == PassState::kLocal || state == PassState::kReducing; }

// The state after an event, by the tables above. Throw InternalError, with the names of both, for an event that the
// state does not allow.
BucketState after(BucketState state, BucketEvent event);
PassState after(PassState state, PassEvent event);

}  // namespace ds::zero
