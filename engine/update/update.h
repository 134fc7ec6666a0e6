// How the weights of a step come about: one path for each place where an update works, chosen once by the plan.
//
// A path knows nothing of losses, norms and counters: OptimizerStep asks it for the update of gradients that are
// reduced and judged. All methods on the engine's thread.
#pragma once

#include <ATen/core/Tensor.h>

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
  // What comes next, for which updates that are under way end.
  enum class Next {
    kBackward,  // gradients are added to those there are
    kStep,      // the reductions are finished and judged
    kRead,      // somebody reads or changes the state
    kDrop,      // the gradients are dropped; nothing throws
  };

  virtual ~Update() = default;
  // Runs `pass`, which gives the last gradients of the step. They will be multiplied by `gradient_scale()`, for which
  // the host may have to wait, if nothing is clipped.
  virtual void run_last_pass(const std::function<double()>& /*gradient_scale*/, const std::function<void()>& pass) {
    pass();
  }
  // Updates all weights from the reducer's gradients times `gradient_scale`, and publishes them. What is thrown may
  // leave some slices updated, which the order of calls then knows.
  virtual void apply(double gradient_scale) = 0;
  // Whether apply_on_device() takes all steps of this rank: what only the device knows of them changes nothing for the
  // host.
  virtual bool takes_device_scale() const { return false; }
  // As apply().
  virtual void apply_on_device(const optimizers::StepScale& /*scale*/) {}
  // Ends what is under way beside the program, as far as `next` needs it: it reaches the parameters, or is undone.
  // Collective with kStep and kRead.
  virtual void settle(Next /*next*/) {}
  // For the next apply(), by the program's optimizer: it asks for the loss as often as it likes. The first answer is of
  // the gradients that are there, each later one makes new ones. Null: no more.
  // NOLINTNEXTLINE(performance-unnecessary-value-param): a path that has one keeps it
  virtual void evaluate_by(std::function<at::Tensor()> /*closure*/) {}
  // Once a step, when it is over, applied or not.
  virtual void step_over() {}
};

// What a path works on; all of it outlives the path.
struct UpdateParts {
  ModelState& state;
  CallOrder& order;
  Progress& progress;
  checkpoint::BackgroundSave& saving;  // reads masters and states: to be waited for before they change
};

// The path that the plan asks for. The optimizer is in `parts.state`.
std::unique_ptr<Update> make_update(const UpdateParts& parts);

}  // namespace ds::engine
