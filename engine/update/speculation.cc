// When an update on the host begins before its gradient is judged, and what becomes of it (super_offload).
#include <string>
#include <utility>

#include "core/log.h"
#include "core/text.h"
#include "engine/engine_impl.h"

namespace ds::engine {

// The reducer is in a backward already: what it has set aside from an earlier one is no last gradient.
void Engine::Impl::begin_speculation(bool boundary) {
  if (!offloaded || !offloaded->speculation() || !speculation_gate.open()) return;
  // An open scope of gathered_parameters() may write to masters when it ends.
  if (!boundary || !synchronize || gathered_scopes > 0) return;
  saving.wait_copied();
  const double gradient_scale = 1.0 / (loss_scaler ? loss_scaler->scale() : 1.0);
  offloaded->speculation()->begin(*optimizer, gradient_scale, [this, gradient_scale](const at::Tensor& gradient) {
    clip_by_value(gradient, gradient_scale);
  });
  speculation = SpeculationOutcome::kRolledBack;
}

void Engine::Impl::end_arrivals() {
  if (offloaded && offloaded->speculation()) offloaded->speculation()->end_arrivals();
}

void Engine::Impl::roll_back_speculation() noexcept {
  if (offloaded && offloaded->speculation()) offloaded->speculation()->roll_back();
}

bool Engine::Impl::speculation_fits(double gradient_scale) {
  if (!offloaded || !offloaded->speculation()) return false;
  if (offloaded->speculation()->fits(gradient_scale)) return true;
  roll_back_speculation();
  return false;
}

bool Engine::Impl::publish_speculation() {
  const bool stands =
      offloaded->speculation()->accept([this](size_t b, const at::Tensor& weights) { publish(b, weights); });
  if (stands) speculation = SpeculationOutcome::kStood;
  return stands;
}

void Engine::Impl::judge_speculation() {
  if (!offloaded || !offloaded->speculation()) return;
  const int64_t pause = speculation_gate.step(std::exchange(speculation, SpeculationOutcome::kNone));
  if (pause == 0 || speculation_gate.pauses() > 1) return;
  const double norm = gradient_norm.value_or(0.0);
  const std::string reason = !step_applied ? cat("the step was skipped")
                             : plan.clip_norm > 0 && norm > plan.clip_norm
                                 ? cat("gradient norm ", norm, " above gradient_clipping ", plan.clip_norm)
                                 : cat("the gradient or the state was used before step()");
  log::info("super_offload: the last ", SpeculationGate::kFailures,
            " updates that began before the gradient was judged ", "had to be undone (step ", global_steps, ": ",
            reason, "). The next ", pause, " steps wait for the norm, then it is ",
            "tried again, with longer pauses as long as it fails. ", speculation_gate.stood(), " of ",
            speculation_gate.stood() + speculation_gate.rolled_back(), " stood so far");
}

void Engine::Impl::report_speculation() const {
  const int64_t begun = speculation_gate.stood() + speculation_gate.rolled_back();
  if (begun == 0 || world->rank() != 0) return;
  log::info("super_offload: ", speculation_gate.stood(), " of ", begun, " updates that began before the gradient was ",
            "judged stood; ", speculation_gate.steps_without(), " steps went without");
}

}  // namespace ds::engine
