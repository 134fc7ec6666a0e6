// The host's update of a step runs beside the next forward and backward, which still read the weights before it
// (OffloadedState::start_update); the next step publishes it.
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

#include "engine/update/slice_steps.h"
#include "engine/update/update_paths.h"

namespace ds::engine {
namespace {

class DelayedUpdate final : public Update {
 public:
  explicit DelayedUpdate(const UpdateParts& parts) : state_(parts.state), order_(parts.order), steps_(parts) {}
  ~DelayedUpdate() override { state_.offloaded->abandon_update(); }  // it uses the optimizer
  DelayedUpdate(const DelayedUpdate&) = delete;
  DelayedUpdate& operator=(const DelayedUpdate&) = delete;

  void apply(double gradient_scale) override {
    const double factor = steps_.factor(gradient_scale);
    optimizers::SliceOptimizer& optimizer = *state_.optimizer.own;
    optimizer.begin_step();
    steps_.all_on_device({.factor = factor, .device_factor = {}, .skip = {}});
    if (optimizer.step_count() >= state_.plan.delayed_update_start) {
      state_.offloaded->start_update(optimizer, factor, [this, factor](const at::Tensor& gradient) {
        steps_.clip_by_value(gradient, {.factor = factor, .device_factor = {}, .skip = {}});
      });
    } else {
      steps_.all_on_host(factor);
    }
    state_.access->end_update();
  }

  void settle(Next next) override {
    if (next == Next::kStep || next == Next::kRead) finish();
  }

 private:
  // Publishes what the update of the last step has made.
  void finish() {
    if (!state_.offloaded->update_runs()) return;
    const at::NoGradGuard no_grad;
    state_.access->wait_all();
    state_.offloaded->finish_update([this](size_t b, const at::Tensor& weights) { steps_.publish(b, weights); });
    at::autocast::clear_cache();  // copies of the weights before
    state_.access->end_update();
    order_.update_done();
  }

  ModelState& state_;
  CallOrder& order_;
  SliceSteps steps_;
};

}  // namespace

std::unique_ptr<Update> make_delayed_update(const UpdateParts& parts) { return std::make_unique<DelayedUpdate>(parts); }

}  // namespace ds::engine
