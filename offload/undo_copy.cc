#include "offload/undo_copy.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "core/check.h"

namespace ds::offload {

void UndoCopy::keep(std::vector<at::Tensor> tensors) {
  ensure(!holds() && tensors.size() == memory_.size(), "an undo copy has memory for as many tensors as it keeps");
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < tensors.size(); ++i) {
    ensure(tensors[i].numel() == memory_[i].numel() && tensors[i].scalar_type() == memory_[i].scalar_type(),
           "an undo copy is like the tensor it keeps");
    memory_[i].copy_(tensors[i]);
  }
  kept_ = std::move(tensors);
}

void UndoCopy::restore() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < kept_.size(); ++i) kept_[i].copy_(memory_[i]);
  forget();
}

}  // namespace ds::offload
