// Whether ranks still hold the same where they should: the key check_replicas.
//
// A value that changes on one rank alone, by a program's mistake or a bit that memory lost, makes replicas drift apart
// in silence: losses and gradient norms are the same on all ranks, because they are added up. After every so many steps
// each rank computes checksums of what it has, on its device, and ranks compare them. The host does not wait for a
// GPU: it reads the result in the next step.
//
// What is compared, to the bit:
//  * among data-parallel ranks: parameters that each has in full (stages 0 to 2, and frozen ones there), masters at
//    stage 0, and the statistics of BatchNorm layers that are computed over the ranks;
//  * among the copies of mics_shard_size: what ranks keep at the same place of each copy;
//  * along a tensor axis: parameters that are not split. Each rank computes them, so a difference is a warning;
//  * among stages of a pipeline: tied weights, but at stage 3;
//  * on each rank: parameters of 16 bits and their masters, rounded.
// Left out are masters in host memory and files, slices in files, and parameters under ZeroOneAdam, whose ranks step by
// themselves between their meetings.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/order/call_order.h"
#include "core/device/readback.h"
#include "model/state/model_state.h"

namespace ds::engine {

// One per engine, used by its thread. All methods but forget() are collective.
class ReplicaWatch {
 public:
  // Both outlive it. `every`: the key; 0: nothing is compared. `consistency` is told when ranks have parted.
  ReplicaWatch(const ModelState& state, ModelConsistency& consistency, int64_t every);

  // Begins a comparison, where one is due after step number `step`, which is made. On a CPU it calls judge().
  void step_made(int64_t step);
  // Waits for the comparison that was begun last, if it has not been judged. Throws UsageError on all ranks of the job
  // where something differs: its name, the ranks, the step, and what to do. Along a tensor axis rank 0 logs it once.
  void judge();
  // Drops the comparison, because a loaded state takes the place of what it was about.
  void forget() { begun_.reset(); }

  // The values that the ranks of one group should have alike, or that a rank compares by itself.
  struct Comparison {
    comm::Communicator* ranks = nullptr;  // null: each rank looks at itself
    const char* among = "";               // "data-parallel ranks"
    bool by_rounding = false;             // each rank computes them: a difference may be rounding, and is a warning
    std::vector<std::string> names;
    at::Tensor numbers;  // int64 [names]: checksums or, where a rank looks at itself, 0 for what is right
  };

 private:
  struct Round {
    int64_t step = 0;
    std::vector<Comparison> comparisons;
    Readback problem;  // int64 [1]: whether any rank has found something
  };
  // Returns what of a comparison differs, for a sentence; empty: nothing. Collective over its ranks.
  std::string difference_in(const Comparison& comparison) const;

  const ModelState& state_;
  ModelConsistency& consistency_;
  int64_t every_;
  std::optional<Round> begun_;
  bool warned_ = false;
};

}  // namespace ds::engine
