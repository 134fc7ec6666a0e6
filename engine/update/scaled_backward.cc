#include "engine/update/scaled_backward.h"

#include <utility>

#include "core/check.h"
#include "model/state/finished_gradients.h"

namespace ds::engine {

at::Tensor ScaledBackward::averaged(const at::Tensor& loss) const {
  const int64_t micro_batches = parts_.order.micro_batches.per_update();
  return micro_batches == 1 ? loss : loss / static_cast<double>(micro_batches);
}

double ScaledBackward::addend_factor() const {
  return parts_.state.plan.average_gradients ? parts_.state.ranks.sequence_ranks() : 1.0;
}

at::Tensor ScaledBackward::scaled(const at::Tensor& averaged) const {
  if (device_scale_.defined()) return averaged.to(at::kFloat) * device_scale_.to(averaged.device());
  const double scale = loss_scale();
  return scale == 1.0 ? averaged : averaged.to(at::kFloat) * scale;
}

double ScaledBackward::loss_scale() const {
  if (!parts_.loss_scaler) return 1.0;
  if (device_scale_.defined()) read_scale_();
  ensure(!device_scale_.defined(), "a step that is read has told its loss scale");
  return parts_.loss_scaler->scale();
}

void ScaledBackward::take_device_scale(at::Tensor scale, std::function<void()> read) {
  device_scale_ = std::move(scale);
  read_scale_ = std::move(read);
}

void ScaledBackward::begin_micro_batch(int64_t micro_batch) {
  if (parts_.state.gradients.check) parts_.state.gradients.check->begin_pass(micro_batch);
}

void ScaledBackward::run(bool boundary, const std::function<void()>& pass, std::vector<char> in_pass) {
  zero::ParameterAccess& access = *parts_.state.access;
  const GradientDeps& gradients = parts_.state.gradients;
  go_on_with_gradients(parts_.state);
  access.begin_backward(/*update_follows=*/boundary);
  if (gradients.reduction) gradients.reduction->begin_pass(parts_.progress.global_steps, loss_scale());
  gradients.reducer->begin_backward(parts_.order.scopes.synchronizes(), boundary, std::move(in_pass));
  const auto reduced_pass = [&] {
    pass();
    gradients.reducer->end_backward();
  };
  try {
    if (parts_.order.scopes.gives_last_gradients(boundary)) {
      // Which ranks update inside the pass is each one's own matter, so that all exchange their counts before it.
      if (parts_.state.plan.offload.speculative) counts_.divisor();
      parts_.update.run_last_pass([this] { return 1.0 / gradient_scale(); }, reduced_pass);
    } else {
      reduced_pass();
    }
    access.end_backward();
  } catch (...) {
    gradients.reducer->abandon_backward();
    parts_.update.settle(Update::Next::kDrop);
    access.change_mode();
    throw;
  }
}

void ScaledBackward::drop(bool unused) {
  forget_gradients(parts_.state);
  counts_.forget();
  parts_.batches.forget(unused);
  if (parts_.state.gradients.check) parts_.state.gradients.check->reset();
}

}  // namespace ds::engine
