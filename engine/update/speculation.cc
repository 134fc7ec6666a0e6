// The host begins to update inside the last backward, before the gradient is judged, and goes back when the step is
// then clipped or skipped, or somebody uses the state before it (super_offload, model/offloaded/speculative_update.h).
#include <string>
#include <utility>

#include "core/log.h"
#include "core/text.h"
#include "engine/update/update.h"

namespace ds::engine {
namespace {

class Speculation final : public Update {
 public:
  explicit Speculation(const UpdateDeps& deps)
      : state_(deps.state),
        progress_(deps.progress),
        saving_(deps.saving),
        gate_(deps.progress.speculation),
        begun_(*deps.state.offloaded->speculation()),
        steps_(deps) {}

  ~Speculation() override {
    begun_.roll_back();  // it uses the optimizer
    report();
  }
  Speculation(const Speculation&) = delete;
  Speculation& operator=(const Speculation&) = delete;

  // The reducer is in a backward already: what it has set aside from an earlier one is no last gradient.
  void run_last_pass(const std::function<double()>& gradient_scale, const std::function<void()>& pass) override {
    if (gate_.open()) begin(gradient_scale());
    pass();
    begun_.end_arrivals();
  }

  void apply(double gradient_scale) override {
    const double factor = steps_.factor(gradient_scale);
    const bool fits = begun_.fits(factor);
    if (!fits) {
      begun_.roll_back();
      state_.optimizer.own->begin_step();
    }
    steps_.all_on_device({.factor = factor, .device_factor = {}, .skip = {}});
    if (!fits || !publish()) steps_.all_on_host(factor);
    state_.access->end_update();
    average_weights(state_);
  }

  void settle(Next next) override {
    if (next != Next::kStep) begun_.roll_back();
  }

  void step_over() override {
    const int64_t pause = gate_.step(std::exchange(outcome_, SpeculationOutcome::kNone));
    if (pause == 0 || gate_.pauses() > 1) return;
    const double norm = progress_.gradient_norm.value_or(0.0);
    const double limit = state_.plan.clip_norm;
    const std::string reason = !progress_.step_applied ? cat("the step was skipped")
                               : limit > 0 && norm > limit
                                   ? cat("gradient norm ", norm, " above gradient_clipping ", limit)
                                   : cat("the gradient or the state was used before step()");
    log::info("super_offload: the last ", SpeculationGate::kFailures,
              " updates that began before the gradient was judged ", "had to be undone (step ", progress_.global_steps,
              ": ", reason, "). The next ", pause, " steps wait for the norm, then it is ",
              "tried again, with longer pauses as long as it fails. ", gate_.stood(), " of ",
              gate_.stood() + gate_.rolled_back(), " stood so far");
  }

 private:
  void begin(double gradient_scale) {
    saving_.wait_copied();
    begun_.begin(*state_.optimizer.own, gradient_scale, [this, gradient_scale](const at::Tensor& gradient) {
      steps_.clip_by_value(gradient, {.factor = gradient_scale, .device_factor = {}, .skip = {}});
    });
    outcome_ = SpeculationOutcome::kRolledBack;
  }

  bool publish() {
    const bool stands = begun_.accept([this](size_t b, const at::Tensor& weights) { steps_.publish(b, weights); });
    if (stands) outcome_ = SpeculationOutcome::kStood;
    return stands;
  }

  void report() const {
    const int64_t updates = gate_.stood() + gate_.rolled_back();
    if (updates == 0 || state_.ranks.world->rank() != 0) return;
    log::info("super_offload: ", gate_.stood(), " of ", updates, " updates that began before the gradient was ",
              "judged stood; ", gate_.steps_without(), " steps went without");
  }

  ModelState& state_;
  const Progress& progress_;
  checkpoint::BackgroundSave& saving_;
  SpeculationGate& gate_;
  SpeculativeUpdate& begun_;
  SliceSteps steps_;
  SpeculationOutcome outcome_ = SpeculationOutcome::kNone;  // of the running step; kRolledBack until it stands
};

}  // namespace

std::unique_ptr<Update> make_speculative_update(const UpdateDeps& deps) { return std::make_unique<Speculation>(deps); }

}  // namespace ds::engine
