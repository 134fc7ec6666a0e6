// Keeps a model out of the gradients of another one's loss, for a moment.
//
//   {
//     const auto frozen = ds::engine::frozen_scope(discriminator);
//     generator_engine->backward(bce(discriminator->forward(generator->forward(z)), ones));
//   }
//
// Without it the discriminator's gradients are made too, as in torch, and have to be dropped by zero_grad().
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace ds::engine {

// While it lives none of the parameters requires a gradient; then those that did before do again.
class FrozenScope {
 public:
  // Those that require a gradient now.
  explicit FrozenScope(const std::vector<at::Tensor>& parameters) {
    for (const at::Tensor& parameter : parameters) {
      if (!parameter.requires_grad()) continue;
      parameter.set_requires_grad(false);
      frozen_.push_back(parameter);
    }
  }
  ~FrozenScope() {
    for (const at::Tensor& parameter : frozen_) parameter.set_requires_grad(true);
  }
  FrozenScope(const FrozenScope&) = delete;
  FrozenScope& operator=(const FrozenScope&) = delete;

 private:
  std::vector<at::Tensor> frozen_;
};

// `model`: a module holder or a pointer to a module. The graph is made inside of the scope; backward() may come later.
template <class Model>
[[nodiscard]] FrozenScope frozen_scope(const Model& model) {
  return FrozenScope(model->parameters());
}

}  // namespace ds::engine
