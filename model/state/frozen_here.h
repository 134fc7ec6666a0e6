// Parameters that an engine without an optimizer freezes: they require gradients again when it ends, or is not made.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace ds::engine {

class FrozenHere {
 public:
  FrozenHere() = default;
  ~FrozenHere() { restore(); }
  FrozenHere(FrozenHere&& other) noexcept : tensors_(std::exchange(other.tensors_, {})) {}
  FrozenHere& operator=(FrozenHere&& other) noexcept {
    if (this == &other) return *this;
    restore();
    tensors_ = std::exchange(other.tensors_, {});
    return *this;
  }

  // A leaf that requires a gradient.
  void freeze(const at::Tensor& tensor) {
    tensors_.push_back(tensor);
    tensor.set_requires_grad(false);
  }

 private:
  void restore() {
    for (const at::Tensor& tensor : tensors_) tensor.set_requires_grad(true);
    tensors_.clear();
  }

  std::vector<at::Tensor> tensors_;
};

}  // namespace ds::engine
