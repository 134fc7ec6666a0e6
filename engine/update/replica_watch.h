// Whether ranks still hold the same where they should: the key check_replicas.
//
// A value that changes on one rank alone, by a program's mistake or a bit that memory lost, makes replicas drift apart
// in silence: losses and gradient norms are the same on all ranks, because they are added up. After every so many steps
// each rank computes checksums of what it has, on its device, and ranks compare them. The host does not wait for a
// GPU: it reads the result in the next step.
//
// What is compared, to the bit:
//  * among data-parallel ranks: parameters that each has in full (stages 0 to 2, and frozen ones there); at stage 0
//    also masters, states of the optimizer and the moving average; the statistics of BatchNorm layers that are computed
//    over the ranks; with broadcast_buffers, all buffers;
//  * among the copies of mics_shard_size: the same of what ranks keep at the same place of each copy;
//  * along a tensor axis: the same of parameters that are not split, and the default generators;
//  * among stages of a pipeline: the same of tied weights;
//  * on each rank: parameters of 16 bits and their masters, rounded.
// Masters and states count wherever a step leaves them in memory: on the device, in host memory (offload_optimizer,
// super_offload), or in a program's optimizer of torch's classes. Left out are those in files, which a comparison would
// have to read; those of a delayed update, which still changes them; with a ratio of offload_optimizer, those along a
// tensor axis and of tied weights; states of a class of the program's, which only its serialize() shows, through the
// host; parameters in files; and all under ZeroOneAdam, whose ranks step by themselves between their meetings.
//
// Note [Replicas that part by rounding]
// Where each rank computes an update by itself, from the same gradients, replicas are equal to the bit only while the
// ranks round alike. Processors of several kinds do not: they add in vectors of other lengths, and some have no fused
// multiplication. Ranks therefore compare at the start what rounds (arithmetic_of()). Where that differs, a difference
// in what ranks compute is a warning with its size, said again when it has grown tenfold. It is so along a tensor axis
// in any case, where each rank computes the gradient of a replicated parameter too, by kernels that may add in another
// order. Adam makes differences of any size from such gradients, so that no bound tells rounding from a fault. What is
// sent to all ranks (weights at stages 1 to 3), what nobody changes (frozen parameters), whole numbers, and NaN or
// infinity on one rank alone are no rounding: these are errors everywhere.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "config/order/call_order.h"
#include "config/plan/plan.h"
#include "core/device/readback.h"
#include "engine/update/replicated_values.h"
#include "model/state/model_state.h"

namespace ds::engine {

// Returns a text that differs on ranks whose sums and updates may round in other ways: the processor, its vectors, the
// number of threads, and a sum that the device has made. Waits for the device.
std::string arithmetic_of(c10::Device device);

// One per engine, used by its thread. Its construction and all methods but add_row(), note_backward() and forget() are
// collective.
class ReplicaWatch {
 public:
  // Both outlive it. `every`: the key; 0: nothing is compared. `consistency` is told when ranks have parted.
  // `arithmetic`: in place of arithmetic_of() this rank's device; empty: that.
  ReplicaWatch(const ModelState& state, ModelConsistency& consistency, int64_t every, std::string arithmetic = {});

  // Appends to the plan, in place of a row on the key, that ranks round in different ways; nothing where they do not.
  void add_row(Plan& plan) const;
  // Notes whether the last backward(), or batch of a pipeline, has made the buffers of all data-parallel ranks one.
  void note_backward(bool buffers_shared) { buffers_shared_ = buffers_shared; }
  // Begins a comparison, where one is due after step number `step`, which is made. On a CPU it calls judge().
  void step_made(int64_t step);
  // Waits for the comparison that was begun last, if it has not been judged. Throws UsageError on all ranks of the job
  // where something differs: its name, the ranks, the step, and what to do. Where that may be rounding, rank 0 logs it.
  void judge();
  // Drops the comparison, because a loaded state takes the place of what it was about.
  void forget();

 private:
  struct Round {
    int64_t step = 0;
    std::vector<ReplicatedValues> groups;
    std::vector<at::Tensor> checksums;                          // of each group: int64 [values]
    std::vector<std::pair<std::string, at::Tensor>> roundings;  // compared_with_masters()
    Readback problem;                                           // int64 [1]: whether any rank has found something
  };
  // What a rank tells of a comparison that has found something.
  struct Finding {
    std::string text;                // empty: nothing was found
    std::optional<double> rounding;  // the difference beside the size of the tensor; empty: it is no rounding
  };
  void begin(int64_t step);
  // Returns what the ranks of a group have not alike. Collective over them.
  Finding difference_in(const ReplicatedValues& group, const at::Tensor& checksums) const;
  // Returns how far the values that the ranks of the group computed are apart. Collective over them.
  Finding rounding_in(const ReplicatedValues& group, const std::vector<size_t>& differing) const;
  Finding difference_from_masters(const Round& round) const;
  void warn(int64_t step, const std::string& text, double rounding);

  const ModelState& state_;
  ModelConsistency& consistency_;
  int64_t every_;
  std::vector<std::string> kinds_;   // of arithmetic among the ranks, each with its first rank; empty: all have one
  bool watches_generators_ = false;  // ranks of a tensor axis that are processes
  WatchedGenerators generators_;
  bool buffers_shared_ = false;
  std::optional<Round> begun_;
  std::optional<double> told_;  // the rounding that rank 0 has warned of; empty: none, or replicas are equal again
};

}  // namespace ds::engine
