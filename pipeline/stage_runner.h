// Executes the schedule of a pipeline: one rank's list of actions (schedule/schedule.h), on the stages of a
// PipelineModule. The orders themselves (1F1B and others) are made in schedule/compute_order.cc.
//
// Sends and receives run beside the computation; a stage waits only for its own input. From its forward to the end of
// its backward a micro-batch keeps the autograd graph of the stage. The values of outputs are dropped once they are
// sent, and stay until backward where the next stage is on the same rank.
//
// Note [Memory that others can write]
// What a stage returns, and the gradients of its inputs, are read after the call that made them: by a message under
// way, by another stage of this rank. Meanwhile a layer may change what it keeps (a counter, a table, a state) in its
// next forward, a function in its next backward, a source its buffer. So a tensor is copied where somebody else can
// reach its memory: holds the tensor, its storage or the base of a view (find_shared()), or has given the memory
// (from_blob). It is not copied where the memory is this micro-batch's alone, which costs the usual stage nothing:
//   * what the stage was given for the micro-batch and passes on;
//   * an output with a graph, if nobody else holds the tensor itself. Autograd may have saved it, which nobody can tell
//     from a layer that has kept an alias. Where its version counter has changed before it is read: UsageError.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/pipeline.h"
#include "pipeline/schedule/schedule.h"
#include "pipeline/split_activations.h"
#include "pipeline/stage_backward.h"
#include "pipeline/stage_messages.h"

namespace ds::pipeline {

// The parts of training that the runner leaves to its caller.
struct StageCallbacks {
  // Returns the next micro-batch. Called once for each, in order, and only on ranks with the first or the last stage; a
  // rank that has both calls it once per micro-batch.
  BatchSource next;
  // Returns the scaled loss, from which backward starts.
  std::function<at::Tensor(const at::Tensor& loss)> root;
  // Runs `pass`, a backward pass that adds to the gradients of weights of the action's stage. `last`: it is this rank's
  // last such pass in the batch, so that gradients are complete after it.
  std::function<void(const Action& action, bool last, const std::function<void()>& pass)> accumulate;
  // Runs `pass`, a backward pass that makes only the gradients of a stage's inputs, and adds to no weight's.
  std::function<void(const std::function<void()>& pass)> inputs_only;
};

// An action and when it ran.
struct TracedAction {
  Action action;
  double start = 0;  // seconds on the host's steady clock
  double end = 0;
};

// Runs the batches of one rank. Used by one thread.
class StageRunner {
 public:
  // `module`, which is built, and `ranks` outlive the runner. Collective over `ranks`.
  StageRunner(const PipelineModule& module, comm::Communicator& ranks, const MessageOptions& options);

  // The results of the last stage for a batch.
  struct Result {
    // The loss of each micro-batch, in order, as detached scalars; empty without `with_loss`, and on ranks without the
    // last stage.
    Tensors losses;
    // The outputs for each micro-batch; empty without `keep_outputs`, and on ranks without the last stage.
    std::vector<Tensors> outputs;
  };
  // Runs one batch by `schedule`, which has to have passed the checks of schedule_check.h. The actions at its end,
  // REDUCE, REDUCE_TIED and STEP, are left to the caller. A schedule of inference runs without gradients, and computes
  // losses if `with_loss`. After an exception a pipeline of several ranks cannot be used again, because messages may be
  // under way: run() then throws UsageError.
  Result run(const Schedule& schedule, const StageCallbacks& callbacks, bool with_loss = true,
             bool keep_outputs = false);

  // Turns recording on or off. traced() then has the compute actions of the last batch; on an accelerator each of them
  // ends with a wait for the device.
  void trace(bool on) { traces_ = on; }
  const std::vector<TracedAction>& traced() const { return traced_; }
  StageMessages& messages() { return messages_; }

 private:
  using Key = std::pair<int, int>;  // stage, micro-batch
  // One micro-batch on its way through one stage.
  struct Passing {
    Activation inputs;    // leaves: parts of what is split over a tensor axis
    TensorSplits splits;  // of the outputs
    Tensors outputs;      // parts as well; backward needs their shapes, and the next stage on this rank their values
    std::vector<int64_t> versions;  // of the outputs, when the stage had returned them
    std::unique_ptr<StageBackward> backward;
    Tensors gradients;  // the inputs' gradients
  };
  struct Run;

  Result run_batch(Run& run);
  void do_action(Run& run, const Action& action);
  Activation inputs_of(Run& run, const Action& action);
  void forward(Run& run, const Action& action);
  void finish_last(Run& run, const Action& action, Passing& own);
  void backward(Run& run, const Action& action);
  void backward_weight(Run& run, const Action& action);
  const MicroBatch& micro_batch(Run& run, int index);
  void use_up(Run& run, int micro_batch);
  at::Tensor loss(int micro_batch, const Tensors& outputs, const Tensors& labels) const;
  void require_outputs_unchanged(int stage, int micro_batch, const Passing& passing, bool read) const;
  std::string backward_place(const Action& action) const;
  StageMessages::Route route(const Run& run, const Action& action, int made_by, int neighbour) const;
  bool here(const Run& run, int stage) const;
  void record(const Action& action, std::chrono::steady_clock::time_point start);

  const PipelineModule& module_;
  comm::Communicator& ranks_;
  at::Device device_;
  std::shared_ptr<SplitAxis> axis_;  // null: layers are not split
  StageMessages messages_;
  std::string failure_;  // the message of the exception that ended a batch; empty: none did
  bool traces_ = false;
  std::vector<TracedAction> traced_;
};

}  // namespace ds::pipeline
