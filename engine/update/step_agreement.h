// The comparison of ranks once a step: without it, ranks whose data or models differ would go on without an error.
//
// AxisAgreement comes first: the ranks of one tensor axis run one program on one batch. StepAgreement follows over the
// data-parallel ranks. It takes the verdict of this rank's axis with it, and brings the loss of the global batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/device/readback.h"
#include "dsengine/comm.h"
#include "engine/update/micro_batch_digests.h"
#include "engine/update/shared_batches.h"
#include "engine/update/step_settings.h"
#include "model/state/tensor_parts.h"

namespace ds::engine {

// Facts of this rank since the last step, which the ranks of a tensor axis compare.
struct AxisFacts {
  int64_t step = 0;
  int64_t delivered = 0;          // batches that the engine's loader has given, for messages
  uint64_t position = 0;          // digest of where the loader stands
  at::Tensor loss;                // float64 [], on the ranks' device; undefined: not known
  DataDigest data;                // digest of what split operators have read
  uint64_t changes = 0;           // digest of what the program did to parameters, this rank's parts included
  uint64_t axis_changes = 0;      // digest of what the program did to parameters that are replicated along the axis
  uint64_t gradient_changes = 0;  // digest of what the program did to reduced gradients
  uint64_t settings = 0;          // StepSettings::digest()
};

// The outcome of the comparison, equal on all ranks of the axis.
struct AxisVerdict {
  std::string problem;       // says which two ranks differ, and in what; empty: all agree
  bool in_settings = false;  // what differs first are settings
  uint64_t changes = 0;  // digest of AxisFacts::changes of all ranks, for StepAgreement; 0: no parameter was changed
};

// One exchange of a few numbers over a tensor axis. The host need not wait for them: StepAgreement sends what it needs
// of the verdict from device to device, and the words are read later. Collective over the axis. Other axes may come to
// another verdict; StepAgreement tells it to all.
class AxisAgreement {
 public:
  AxisAgreement(const AxisFacts& facts, const TensorParts& parts, c10::Device device);

  // Returns, on the device, whether ranks differ: float64 [], 1 where they do, else 0.
  at::Tensor problem() const;
  // Returns AxisVerdict::changes on the device: int64 [].
  at::Tensor changes() const;
  // Whether verdict() would not wait.
  bool arrived() const { return numbers_.arrived(); }
  // Waits for the numbers and compares them.
  AxisVerdict verdict() const;
  comm::Communicator& ranks() const { return *ranks_; }

 private:
  std::shared_ptr<comm::Communicator> ranks_;
  std::vector<int> world_ranks_;
  bool cuts_batches_;  // they have pieces of batches, not parts of layers
  at::Tensor all_;     // int64 [ranks, places]
  Readback numbers_;   // the same numbers on the host
};

// Facts of this rank since the last step, which data-parallel ranks compare.
struct StepFacts {
  at::Tensor loss;                // float64 [], on the ranks' device; undefined: not known
  std::optional<double> tokens;   // the sum of the counts of backward_mean(): `loss` is a sum over as many
  int64_t step = 0;               // the number of the step
  int64_t delivered = 0;          // batches that the engine's loader has given so far, for messages
  uint64_t position = 0;          // digest of where the loader stands, which load_checkpoint() sets, too
  uint64_t gradient_changes = 0;  // digest of what the program did to reduced gradients
  uint64_t buffers = 0;           // digest of the module's buffers; 0: not looked at
  uint64_t gathers = 0;           // stage 3: digest of the parameters that were gathered, in their order
  int gather_group = 0;           // the number of this rank's group of ranks that gather from one another
  int gather_groups = 1;          // the number of such groups, all of one size
  SharedDigest shared = {};       // of what this rank has cut of a batch that others share
  uint64_t changes = 0;           // digest of what the program did to parameters; with an axis, on all of its ranks
  std::string last_changed;       // the name of a changed parameter, for messages
  // The comparison of this rank's tensor axis, until its verdict is read; null then, and without an axis.
  std::shared_ptr<const AxisAgreement> axis = nullptr;
  std::string axis_problem = {};  // AxisVerdict::problem, once it is read
  // The ranks of the axis, where they differ in settings, once the verdict is read; else null.
  comm::Communicator* axis_in_settings = nullptr;
  const StepSettings* settings = nullptr;  // outlives the comparison
  // In a pipeline, the sums over all ranks of the world of summable_digest() and, behind them, of
  // MicroBatchDigests::summable(), on the ranks' device.
  at::Tensor stages = {};
  std::shared_ptr<const MicroBatchDigests> micro_batches = {};  // of a PipelineModule on several ranks
  comm::Communicator* world = nullptr;                          // all ranks; outlives the comparison
};

// One exchange of a few numbers over data-parallel ranks, begun before the step waits for its reductions. Collective.
class StepAgreement {
 public:
  // Begins the exchange. The group outlives it.
  StepAgreement(StepFacts facts, comm::Communicator& ranks, at::Device device);

  // Begins to copy the numbers to the host and does not wait. finish() may come much later, but on all ranks at the
  // same place.
  void begin_reading();
  // Whether the numbers have come: loss() and differs() do not wait then.
  bool arrived() const { return sums_.arrived() && stages_.arrived() && (!facts_.axis || facts_.axis->arrived()); }
  // Whether finish() would throw. Waits for the numbers, and exchanges nothing more: all ranks have the same ones.
  bool differs() const;
  // Whether buffers were compared and are not the same on all ranks, which is no error. Called after finish().
  bool buffers_differ() const;
  // Returns the mean loss as finish() does, without comparing anything. Waits for the numbers.
  std::optional<double> loss() const;
  // Returns the sum of StepFacts::tokens over the ranks; 0 without any. Waits for the numbers.
  double tokens() const;
  // Returns the same on the ranks' device, float64 [1], after begin_reading(); undefined without any.
  const at::Tensor& tokens_on_device() const { return tokens_on_device_; }
  // Waits for the numbers and compares them. Returns the mean loss, where all ranks know theirs: over ranks, or over
  // all tokens. Where ranks differ in steps, data, parameters or gradients, throws UsageError on all of them, with what
  // each one did. `parted` is set when their models are not the same any more. `updated`: the step has been made
  // meanwhile, so that gradients that differ have parted the models, too.
  std::optional<double> finish(bool& parted, bool updated = false);

 private:
  void read_axis();
  // Whether, inside any one group of ranks that gather from one another, ranks have gathered different parameters. The
  // numbers have come.
  bool gathers_differ() const;
  // Whether settings differ among the ranks of the group, or of a pipeline; whether ranks of the group have changed the
  // states of a client optimizer in different ways, perhaps to the same values. The numbers have come.
  bool settings_differ() const;
  bool states_differ() const;
  bool stages_differ() const;
  // Whether the first and the last stage of a pipeline, or ranks of a tensor axis, took different micro-batches. The
  // numbers have come.
  bool micro_batches_differ() const;
  // Whether what the world's ranks find alike leaves them with different models, once they have updated.
  bool stages_part_models() const;
  at::Tensor sums_of_micro_batches() const;
  // Both throw where ranks differ: along this rank's axis in anything, over the stages of a pipeline in settings or
  // micro-batches, which all ranks of the world find alike and explain together. `updated` as of finish().
  void require_same_along_axis(bool updated) const;
  void require_same_over_stages(bool updated) const;
  [[noreturn]] void explain(const char* what) const;

  StepFacts facts_;
  comm::Communicator& ranks_;
  at::Device device_;
  at::Tensor values_;
  at::Tensor tokens_on_device_;
  comm::Work sum_;
  Readback sums_;    // the added numbers; with one rank, its loss
  Readback stages_;  // StepFacts::stages
  bool reading_ = false;
};

}  // namespace ds::engine
