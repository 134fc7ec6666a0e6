// The program's own optimizer steps on whole parameters, whose gradients are views of the buckets'.
#include <torch/optim/lbfgs.h>

#include <utility>

#include "core/check.h"
#include "engine/update/update_paths.h"
#include "model/state/finished_gradients.h"

namespace ds::engine {
namespace {

class ClientUpdate final : public Update {
 public:
  explicit ClientUpdate(const UpdateParts& parts)
      : state_(parts.state),
        order_(parts.order),
        wants_closure_(dynamic_cast<const torch::optim::LBFGS*>(state_.optimizer.client.get()) != nullptr) {}

  void apply(double gradient_scale) override {
    require(!wants_closure_ || closure_, "step(): torch::optim::LBFGS computes the loss several times inside of its ",
            "step(), by a closure: expected engine->step(closure), where closure() returns the loss after ",
            "engine->backward(loss), found engine->step()");
    give_gradients(gradient_scale);
    order_.slice_updated();
    if (!closure_) {
      state_.optimizer.client->step();
      return;
    }
    bool first = true;
    state_.optimizer.client->step([&] {
      at::Tensor loss = closure_();
      if (!std::exchange(first, false)) give_gradients(1.0);
      return loss;
    });
  }

  void evaluate_by(std::function<at::Tensor()> closure) override { closure_ = std::move(closure); }

 private:
  void give_gradients(double gradient_scale) const {
    const double bound = state_.plan.clip_value;
    for (size_t b = 0; b < state_.buckets.size(); ++b) {
      const at::Tensor gradient = state_.gradients.reducer->gradient(b);
      if (gradient_scale != 1.0) gradient.mul_(gradient_scale);
      if (bound > 0) gradient.clamp_(-bound, bound);
      // Also for parameters that this rank, or its last backward, did not use: all ranks update alike.
      for (const Segment& segment : state_.buckets[b].layout().segments) {
        const at::Tensor& parameter = state_.parameters[static_cast<size_t>(segment.parameter)].tensor;
        parameter.mutable_grad() = state_.held_still[static_cast<size_t>(segment.parameter)] != 0
                                       ? at::Tensor()
                                       : zero::view_of(gradient, segment, parameter);
      }
    }
  }

  ModelState& state_;
  CallOrder& order_;
  bool wants_closure_;
  std::function<at::Tensor()> closure_;
};

}  // namespace

std::unique_ptr<Update> make_client_update(const UpdateParts& parts) { return std::make_unique<ClientUpdate>(parts); }

}  // namespace ds::engine
