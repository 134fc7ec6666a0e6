// What reaches the update beside parameters and gradients, and has to be the same on the ranks: StepAgreement compares
// a digest of it before the step is applied, and the names and values once they differ.
//
// Compared among data-parallel ranks, which update the same parameters:
//  * gradient_accumulation_steps, and the micro-batches that step() has counted, so that a boundary that one rank alone
//    sets (set_gradient_accumulation_boundary()) shows
//  * the loss scale, and how far the learning-rate scheduler is
//  * the options of each parameter group: lr, weight decay, betas, momentum, eps and the like, of the config's
//  optimizer
//    or of one of the program's. What a schedule of the engine or of torch makes of them is among them. Of an optimizer
//    class that is none of torch's it is lr alone
//  * the steps that the states of an optimizer of the program's have counted, where it steps on whole parameters
//  * whether the losses of the step came with counts (backward_mean())
//  * values given to safe_set_full_*(), and at stage 0, where all ranks have all of them, to safe_set_local_*(): until
//    they are set again, gradients until their step
// Ranks of a tensor axis are compared in the same, but for safe_set_local_*(), because each has a part of its own, and
// in the sum of the counts of backward_mean(). Stages of a
// pipeline have parameters of their own: they are compared in the counts of micro-batches, the loss scale, the
// scheduler, and the options of the config's group, where all parameters are in it. Tensors of optimizer states are not
// compared otherwise: from stage 1 on each rank has its slice of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "config/order/call_order.h"
#include "dsengine/optimizer.h"
#include "engine/update/token_counts.h"
#include "model/state/model_state.h"
#include "model/state/progress.h"
#include "optim/loss_scaler.h"

namespace ds::engine {

// The objects that are looked at; all of them outlive the StepSettings.
struct StepSettingsDeps {
  const ModelState& state;
  const Progress& progress;
  const MicroBatchCounter& micro_batches;
  const std::optional<optimizers::LossScaler>& loss_scaler;
  const std::shared_ptr<LrScheduler>& schedule;  // may be null
  const TokenCounts& counts;
  bool one_group = true;  // no stage of a pipeline has more than one parameter group
};

// One per engine, used by the engine's thread. Nothing here is collective or waits for a device, but note_value() for a
// value on one.
class StepSettings {
 public:
  // The ranks that are compared.
  enum class Among { kDataRanks, kTensorRanks, kStages };

  explicit StepSettings(const StepSettingsDeps& deps) : deps_(deps) {}

  // A value that the program has set.
  struct SetValue {
    const char* call;              // "safe_set_full_grad()"
    const std::string& parameter;  // its name
    const at::Tensor& value;
    std::string state = {};    // the name of the optimizer state; empty: the call sets none
    bool is_local = false;     // this rank's part of the values
    bool is_gradient = false;  // of the next step alone
  };
  // Notes a value, in the place of the one that the same call has set before.
  void note_value(const SetValue& set);
  // Forgets gradients that were set: their step is over, or its accumulation is dropped.
  void forget_gradients();
  // Forgets all values that were set: a checkpoint has taken their place.
  void forget_values() { values_.clear(); }

  // The digest of all that is compared: equal where that is the same.
  uint64_t digest(Among among) const;
  // What is compared, as lines "what<TAB>value".
  std::string lines(Among among) const;

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

  StepSettingsDeps deps_;
  std::map<std::string, Kept> values_;  // by call and parameter
};

}  // namespace ds::engine
