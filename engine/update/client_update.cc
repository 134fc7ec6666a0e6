// The program's own optimizer steps on whole parameters, whose gradients are views of the buckets'.
#include <torch/optim/lbfgs.h>

#include "core/check.h"
#include "engine/update/update_paths.h"

namespace ds::engine {
namespace {

class ClientUpdate final : public Update {
 public:
  explicit ClientUpdate(const UpdateParts& parts) : state_(parts.state), order_(parts.order) {
    const bool wants_closure = dynamic_cast<const torch::optim::LBFGS*>(state_.optimizer.client.get()) != nullptr;
    require(!wants_closure,
            "initialize: .optimizer: torch::optim::LBFGS computes the loss several times inside of its ",
            "step(), by a closure that engine->step() does not have. Expected an optimizer that steps once with the ",
            "gradients there are; train with LBFGS outside of the engine");
  }

  void apply(double gradient_scale) override {
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
    order_.slice_updated();
    state_.optimizer.client->step();
  }

 private:
  ModelState& state_;
  CallOrder& order_;
};

}  // namespace

std::unique_ptr<Update> make_client_update(const UpdateParts& parts) { return std::make_unique<ClientUpdate>(parts); }

}  // namespace ds::engine
