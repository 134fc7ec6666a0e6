// What data-parallel ranks tell each other once a step beside gradients: the loss of the global batch, and whether all
// of them have done the same to the model and to the data.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "core/device/readback.h"
#include "dsengine/comm.h"
#include "engine/update/axis_agreement.h"

namespace ds::engine {

// Of this rank, since the last step.
struct StepFacts {
  at::Tensor loss;                // float64 [], on the ranks' device; undefined: not known
  int64_t step = 0;               // its number
  int64_t delivered = 0;          // batches that the engine's loader has given so far, for messages
  uint64_t position = 0;          // digest of where the loader stands, which load_checkpoint() sets, too
  uint64_t gradient_changes = 0;  // digest of what the program did to reduced gradients
  uint64_t buffers = 0;           // digest of the module's buffers; 0: not looked at
  uint64_t gathers = 0;           // stage 3: digest of the parameters that were gathered, in their order
  int gather_group = 0;           // of ranks that gather from one another: its number,
  int gather_groups = 1;          // and how many there are, all of one size
  uint64_t changes = 0;           // digest of what the program did to parameters, all ranks of the axis with it
  std::string last_changed;       // the name of one of those
  // Of this rank's tensor axis, where it has one: what it does not agree on, and `changes` of all its ranks.
  std::shared_ptr<const AxisAgreement> axis = nullptr;
  std::string axis_problem = {};  // what it says, when it was read; empty: nothing
};

// One exchange of a few numbers, begun before the reductions of the step are waited for. Collective.
class StepAgreement {
 public:
  // The group outlives it.
  StepAgreement(StepFacts facts, comm::Communicator& ranks, at::Device device);

  // Has the numbers read, without waiting for them: finish() may come much later, but on all ranks in one place.
  void begin_reading();
  // Whether the numbers have come: loss() and differs() do not wait then.
  bool arrived() const { return sums_.arrived() && (!facts_.axis || facts_.axis->arrived()); }
  // Whether finish() would throw. Waits; no talk to other ranks, which know the same.
  bool differs() const;
  // After finish(): whether buffers were looked at and are not the same on all ranks, which is no error.
  bool buffers_differ() const;
  // As finish(), without a judgement and without talking to other ranks.
  std::optional<double> loss() const;
  // Waits. Returns the mean loss, where all ranks know theirs. Throws UsageError, on all ranks, with what each of them
  // did where they differ: in parameters (`parted` is set then: the ranks' models are not the same any more), data or
  // steps. `updated`: the step has been made meanwhile, so that other gradients have parted the models, too.
  std::optional<double> finish(bool& parted, bool updated = false);

 private:
  void read_axis();
  // Whether ranks of one group, of any, have gathered other parameters. Of sums that are there.
  bool gathers_differ() const;
  [[noreturn]] void explain(const char* what) const;

  StepFacts facts_;
  comm::Communicator& ranks_;
  at::Device device_;
  at::Tensor values_;
  comm::Work sum_;
  Readback sums_;  // or, of one rank, its loss
};

}  // namespace ds::engine
