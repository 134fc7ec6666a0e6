// The inputs of an update beside parameters and gradients that have to be the same on all ranks. StepAgreement compares
// a digest of them before a step is applied, and the names and values when digests differ.
//
// Data-parallel ranks update the same parameters, and are compared in
//  * gradient_accumulation_steps and the number of micro-batches that step() has counted, which differ where one rank
//    alone sets a boundary (set_gradient_accumulation_boundary());
//  * the loss scale, and last_batch_iteration of the learning-rate scheduler;
//  * the options of each parameter group as they are now, after any schedule: lr, weight decay, betas, momentum, eps
//    and the like, of the config's optimizer or of a client optimizer. Of a client optimizer whose class is none of
//    torch's it is lr alone;
//  * the steps that the states of a client optimizer have counted, where it steps on full parameters;
//  * whether the losses of the step came with counts (backward_mean());
//  * the values that the program has set by safe_set_full_*() and, at stage 0, where every rank has all elements, by
//    safe_set_local_*(). A value is compared until it is set again, a gradient until its step is over.
//
// Ranks of a tensor axis are compared in the same settings without safe_set_local_*(), because each has a part of its
// own, and also in the sum of the counts of backward_mean(). Stages of a pipeline have parameters of their own. They
// are compared in the numbers of micro-batches, the loss scale, the scheduler, and the options of the config's group
// where all parameters are in that one group.
//
// States of a client optimizer of torch's classes that the program has changed between two steps are compared apart,
// at stage 0, where all ranks have them: a rank may change them to what the others have, so that digests of
// changes differ and values do not. Other states are not compared: from stage 1 on each rank has its slice of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "config/order/call_order.h"
#include "dsengine/comm.h"
#include "dsengine/optimizer.h"
#include "engine/update/client_state_watch.h"
#include "engine/update/token_counts.h"
#include "model/state/model_state.h"
#include "model/state/progress.h"
#include "optim/loss_scaler.h"

namespace ds::engine {

// The objects that the settings are read from; all of them outlive the StepSettings.
struct StepSettingsDeps {
  const ModelState& state;
  const Progress& progress;
  const MicroBatchCounter& micro_batches;
  const std::optional<optimizers::LossScaler>& loss_scaler;
  const std::shared_ptr<LrScheduler>& schedule;  // may be null
  const TokenCounts& counts;
  bool one_group = true;  // no stage of a pipeline has more than one parameter group
};

// One per engine, used by the engine's thread. Only require_same_states() and explain_difference() are collective; only
// note_value() and what compares changed states may wait for a device.
class StepSettings {
 public:
  // The ranks that are compared: data-parallel ones, those of a tensor axis, or the stages of a pipeline.
  enum class Among { kDataRanks, kTensorRanks, kStages };

  explicit StepSettings(const StepSettingsDeps& deps) : deps_(deps), client_states_(deps.state) {}

  // A value that the program has set.
  struct SetValue {
    const char* call;              // "safe_set_full_grad()"
    const std::string& parameter;  // its name
    const at::Tensor& value;
    std::string state = {};    // the name of the optimizer state; empty: the call sets none
    bool is_local = false;     // the value holds this rank's part alone
    bool is_gradient = false;  // the value is a gradient, for the next step alone
  };
  // Notes the norm and the checksum of a value, in place of those of an earlier call for the same parameter and state.
  // Waits for the device of the value.
  void note_value(const SetValue& set);
  // Forgets gradients that were set. To be called when their step is over or its accumulation is dropped.
  void forget_gradients();
  // Forgets all values that were set. To be called when other values, of a checkpoint, have replaced them.
  void forget_values() { values_.clear(); }

  // Takes the states of a client optimizer for those that all ranks have alike: see ClientStateWatch::note().
  void note_states() { client_states_.note(); }

  // Returns a digest of the settings and the number of the step: equal on ranks whose settings are equal.
  uint64_t digest(Among among) const;
  // Throws UsageError with the first setting in which `ranks`, all of which come here, differ. `updated`: the step has
  // been made meanwhile.
  [[noreturn]] void explain_difference(Among among, comm::Communicator& ranks, bool updated) const;
  // Returns a digest of what the program has changed in the states of its optimizer since the last step; 0: nothing.
  uint64_t digest_of_states() const { return client_states_.digest_of_changes(); }
  // Compares these states, on data-parallel ranks whose digests differ. Throws UsageError on all of them with the first
  // state that is not the same.
  void require_same_states(comm::Communicator& ranks, bool updated) const;

 private:
  struct Kept {
    uint64_t digest = 0;
    std::string text;
    bool is_local = false;
    bool is_gradient = false;
  };

  // Calls use(what, value, group), where `group` is the number of the parameter group, or -1, for each number.
  template <class Use>
  void visit(Among among, const Use& use) const;
  template <class Use>
  void visit_groups(Among among, const Use& use) const;
  static bool compares(const Kept& kept, Among among);
  // Returns the settings for a message, as lines "what<TAB>value".
  std::string lines(Among among) const;
  // Returns what is not the same on all of `ranks`, with the values of two of them; empty where all is. Collective.
  std::string difference(const std::string& lines, comm::Communicator& ranks) const;
  std::string outcome(bool updated) const;

  StepSettingsDeps deps_;
  std::map<std::string, Kept> values_;  // by call and parameter
  ClientStateWatch client_states_;
};

}  // namespace ds::engine
