// Executes one rank's list of actions (schedule.h) on the stages of a PipelineModule.
//
// Sends and receives run beside the computation; what a stage waits for is the arrival of its own input. A micro-batch
// keeps the graph of its stage from forward to the end of its backward, not the stage's outputs.
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
#include "pipeline/stage_backward.h"
#include "pipeline/stage_messages.h"

namespace ds::pipeline {

// The parts of training that the runner does not know.
struct StageCallbacks {
  // Called once for each micro-batch, also where first and last stage are on one rank.
  BatchSource next;
  // The tensor that backward starts from: the loss, scaled.
  std::function<at::Tensor(const at::Tensor& loss)> root;
  // Runs `pass`, which adds to gradients of weights of `action`'s stage; `last`: none of this rank follows in this
  // batch.
  std::function<void(const Action& action, bool last, const std::function<void()>& pass)> accumulate;
  // Runs `pass`, a backward pass that makes gradients of a stage's inputs alone.
  std::function<void(const std::function<void()>& pass)> inputs_only;
};

struct TracedAction {
  Action action;
  double start = 0;  // seconds on the host's steady clock
  double end = 0;
};

class StageRunner {
 public:
  // All outlive the runner. `module` is built. Collective over `ranks`.
  StageRunner(const PipelineModule& module, comm::Communicator& ranks, MessageOptions options);

  struct Result {
    // The loss of each micro-batch, in order, on the rank of the last stage; else empty. Detached scalars.
    Tensors losses;
    // Inference with `keep_outputs`: the last stage's outputs of each micro-batch.
    std::vector<Tensors> outputs;
  };
  // `schedule` is sound. Its last actions, REDUCE, REDUCE_TIED and STEP, are for the caller to do then. A schedule of
  // inference runs without gradients; `with_loss`: its losses are computed. After an exception a pipeline of several
  // ranks cannot be used again, for messages of the batch may be under way: then it throws UsageError.
  Result run(const Schedule& schedule, const StageCallbacks& callbacks, bool with_loss = true,
             bool keep_outputs = false);

  // From now on the compute actions of each batch are recorded, in place of those of the batch before. On an
  // accelerator each then ends with a wait for the device.
  void trace(bool on) { traces_ = on; }
  const std::vector<TracedAction>& traced() const { return traced_; }
  StageMessages& messages() { return messages_; }

 private:
  using Key = std::pair<int, int>;  // stage, micro-batch
  // One micro-batch on its way through one stage.
  struct Passing {
    Tensors inputs;
    Tensors outputs;  // backward needs their shapes, and the next stage on this rank their values
    std::unique_ptr<StageBackward> backward;
    Tensors gradients;  // the inputs' gradients
  };
  struct Run;

  Result run_batch(Run& run);
  void do_action(Run& run, const Action& action);
  void forward(Run& run, const Action& action);
  void backward(Run& run, const Action& action);
  void backward_weight(Run& run, const Action& action);
  const MicroBatch& micro_batch(Run& run, int index);
  at::Tensor loss(int micro_batch, const Tensors& outputs, const Tensors& labels) const;
  StageMessages::Route route(const Run& run, const Action& action, int made_by, int neighbour) const;
  bool here(const Run& run, int stage) const;
  void record(const Action& action, std::chrono::steady_clock::time_point start);

  const PipelineModule& module_;
  comm::Communicator& ranks_;
  at::Device device_;
  StageMessages messages_;
  std::string failure_;  // what the batch said that ended in an exception; empty: none did
  bool traces_ = false;
  std::vector<TracedAction> traced_;
};

}  // namespace ds::pipeline
