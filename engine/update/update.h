// The update of the weights from gradients that are reduced and judged. The plan chooses one path: on the device, on
// the host (offload_optimizer), a step late (delayed), speculatively inside backward (super_offload; speculation.cc),
// or by an optimizer of the program.
//
// A path knows nothing of losses, norms and counters: those are OptimizerStep's (optimizer_step.h), which calls it. A
// path goes over this rank's slices with SliceSteps and calls the optimizer (optim/shard_optimizer.h) for each. All
// methods run on the engine's thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>

#include "checkpoint/background_save.h"
#include "config/order/call_order.h"
#include "model/state/model_state.h"
#include "model/state/progress.h"
#include "optim/step_scale.h"

namespace ds::engine {

// One path of the update.
class Update {
 public:
  // The event before which updates that are under way have to end.
  enum class Next {
    kBackward,  // a backward pass, which adds gradients
    kStep,      // a step, which finishes the reductions and judges the gradients
    kRead,      // a call that reads or changes the state
    kDrop,      // the gradients are dropped; nothing throws
  };

  virtual ~Update() = default;
  // Runs `pass`, the backward pass that gives the last gradients of the step; a speculative path updates weights
  // meanwhile. `gradient_scale()` returns the factor on gradients of a step that does not clip, and may wait for the
  // device.
  virtual void run_last_pass(const std::function<double()>& /*gradient_scale*/, const std::function<void()>& pass) {
    pass();
  }
  // Updates all weights from the reducer's gradients times `gradient_scale`, and publishes them. After an exception
  // some slices may have been updated; UpdateDeps::consistency knows of it then.
  virtual void apply(double gradient_scale) = 0;
  // Whether apply_on_device() can be called in place of apply(): this rank's whole update can be launched before the
  // host knows whether the device skips the step.
  virtual bool takes_device_scale() const { return false; }
  // Updates all weights as apply() does, with a scale of which parts are known to the device alone.
  virtual void apply_on_device(const optimizers::StepScale& /*scale*/) {}
  // Ends the updates that still run, as far as `next` needs it: their weights are published to the parameters, or the
  // updates are rolled back. Collective with kStep and kRead.
  virtual void settle(Next /*next*/) {}
  // Gives the program's optimizer a closure for the next apply(), which it may call any number of times. The first call
  // returns the loss of the current gradients, and each later one makes new gradients. Null takes the closure away.
  // NOLINTNEXTLINE(performance-unnecessary-value-param): a path that has one keeps it
  virtual void evaluate_by(std::function<at::Tensor()> /*closure*/) {}
  // Called once for each step, when the step is over, applied or skipped.
  virtual void step_over() {}
};

// The objects that a path works on; all of them outlive it.
struct UpdateDeps {
  ModelState& state;
  ModelConsistency& consistency;
  Progress& progress;
  checkpoint::BackgroundSave& saving;  // a save that reads masters and states; it is waited for before they change
};

// Makes the path that the plan asks for. The optimizer is in `deps.state`.
std::unique_ptr<Update> make_update(const UpdateDeps& deps);
// Makes the path that updates inside the last backward, before the gradient is judged (super_offload).
std::unique_ptr<Update> make_speculative_update(const UpdateDeps& deps);

// Throws UsageError where the program has frozen parameters since initialize() and the plan's path of the update cannot
// leave their weights and states unchanged: delayed_update, super_offload, offload_optimizer to files, or an optimizer
// that compresses momenta.
void require_freezing_possible(const ModelState& state);

// Updates the moving average with the weights that an update has made, where one is kept. `skip`: StepScale::skip.
inline void average_weights(const ModelState& state, const at::Tensor& skip = {}) {
  if (state.average) state.average->update(skip);
}

// Makes the optimizer's step on this rank's slices of all buckets. Paths of the update consist of its calls.
class SliceSteps {
 public:
  explicit SliceSteps(const UpdateDeps& deps) : state_(deps.state), consistency_(deps.consistency) {}

  // Returns the factor on gradients that the optimizer is called with: `gradient_scale`, times the number of ranks
  // where a compressed exchange takes the mean of gradients that are to be added.
  double factor(double gradient_scale) const;
  // Updates all buckets whose optimizer is on the device, together. `scale.factor` is a result of factor().
  // `scale.device_factor` and `scale.skip` need Update::takes_device_scale().
  void all_on_device(const optimizers::StepScale& scale);
  // Updates all other buckets, one by one. `gradient_scale` is a result of factor().
  void all_on_host(double gradient_scale);
  // Clamps, in place, a gradient that the update will multiply by `scale` to gradient_clip_by_value.
  void clip_by_value(const at::Tensor& gradient, const optimizers::StepScale& scale) const;
  // Copies `weights`, the new weights of this rank's slice on the host, to the bucket, and publishes them.
  void publish(size_t bucket, const at::Tensor& weights);

 private:
  using UpdateInto = std::function<void(const at::Tensor& gradient, const at::Tensor& own)>;
  // Clips the gradient by value and updates the bucket; calls `update_into` where the master is not the bucket's slice.
  void update(size_t bucket, double gradient_scale, const UpdateInto& update_into);
  void on_device(size_t bucket, const optimizers::StepScale& scale);
  // Updates the rows of a row-wise table that have a gradient, and publishes them.
  void on_rows(size_t bucket, const optimizers::StepScale& scale);
  void on_host(size_t bucket, double gradient_scale);

  ModelState& state_;
  ModelConsistency& consistency_;
};

}  // namespace ds::engine
