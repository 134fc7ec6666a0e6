// How the weights of a step come about: one path for each place where an update works, chosen once by the plan.
//
// A path knows nothing of losses, norms and counters: OptimizerStep asks it for the update of gradients that are
// reduced and judged. All methods run on the engine's thread.
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

class Update {
 public:
  // The event for which updates that are under way have to end.
  enum class Next {
    kBackward,  // gradients are added to those there are
    kStep,      // the reductions are finished and judged
    kRead,      // somebody reads or changes the state
    kDrop,      // the gradients are dropped; nothing throws
  };

  virtual ~Update() = default;
  // Runs `pass`, which gives the last gradients of the step. Unless they are clipped, they will be multiplied by
  // `gradient_scale()`, for which the host may have to wait.
  virtual void run_last_pass(const std::function<double()>& /*gradient_scale*/, const std::function<void()>& pass) {
    pass();
  }
  // Updates all weights from the reducer's gradients times `gradient_scale`, and publishes them. After an exception
  // some slices may have been updated; UpdateDeps::consistency knows of it then.
  virtual void apply(double gradient_scale) = 0;
  // Whether apply_on_device() can make every step of this rank: the host does the same whatever the device finds.
  virtual bool takes_device_scale() const { return false; }
  // Updates all weights as apply() does, with a scale of which a part is known to the device alone.
  virtual void apply_on_device(const optimizers::StepScale& /*scale*/) {}
  // Ends what is under way beside the program, as far as `next` needs it: it reaches the parameters, or is undone.
  // Collective with kStep and kRead.
  virtual void settle(Next /*next*/) {}
  // Gives the program's optimizer a closure for the next apply(), which it may call as often as it likes. The first
  // call returns the loss of the gradients that are there, each later one makes new gradients. Null: no closure any
  // more. NOLINTNEXTLINE(performance-unnecessary-value-param): a path that has one keeps it
  virtual void evaluate_by(std::function<at::Tensor()> /*closure*/) {}
  // Is called once a step, when the step is over, applied or not.
  virtual void step_over() {}
};

// The objects that a path works on; all of them outlive it.
struct UpdateDeps {
  ModelState& state;
  ModelConsistency& consistency;
  Progress& progress;
  checkpoint::BackgroundSave& saving;  // reads masters and states: to be waited for before they change
};

// Makes the path that the plan asks for. The optimizer is in `deps.state`.
std::unique_ptr<Update> make_update(const UpdateDeps& deps);
// Makes the path that updates inside the last backward, before the gradient is judged (super_offload).
std::unique_ptr<Update> make_speculative_update(const UpdateDeps& deps);

// Throws UsageError where the program has frozen parameters since initialize() and the plan's path of the update cannot
// leave them as they are, because it works on more than flat states of a slice or elsewhere.
void require_freezing_possible(const ModelState& state);

// The optimizer's step on this rank's slices of buckets, one after the other. Paths of an update are made of it.
class SliceSteps {
 public:
  explicit SliceSteps(const UpdateDeps& deps) : state_(deps.state), consistency_(deps.consistency) {}

  // The factor by which the optimizer multiplies gradients that a step multiplies by `gradient_scale`.
  double factor(double gradient_scale) const;
  // Updates all buckets whose optimizer is on the device, together. Only an optimizer that takes it gets a scale of the
  // device. `scale.factor`: of factor().
  void all_on_device(const optimizers::StepScale& scale);
  // Updates all other buckets, one by one. `gradient_scale`: of factor().
  void all_on_host(double gradient_scale);
  // Applies gradient_clip_by_value to a gradient that the update will multiply by `scale`.
  void clip_by_value(const at::Tensor& gradient, const optimizers::StepScale& scale) const;
  // Publishes the new weights, which are on the host, of a bucket whose master is updated.
  void publish(size_t bucket, const at::Tensor& weights);

 private:
  using UpdateInto = std::function<void(const at::Tensor& gradient, const at::Tensor& own)>;
  // Clips the gradient by value and updates the bucket; calls `update_into` where the master is not the bucket's slice.
  void update(size_t bucket, double gradient_scale, const UpdateInto& update_into);
  void on_device(size_t bucket, const optimizers::StepScale& scale);
  void on_host(size_t bucket, double gradient_scale);

  ModelState& state_;
  ModelConsistency& consistency_;
};

}  // namespace ds::engine
