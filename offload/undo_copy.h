// Exact copies of tensors to go back to, for a change that may have to be undone.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace ds::offload {

// Not thread safe.
class UndoCopy {
 public:
  UndoCopy() = default;
  // `memory`: one tensor for each that is to be kept, of its size and dtype.
  explicit UndoCopy(std::vector<at::Tensor> memory) : memory_(std::move(memory)) {}

  bool holds() const { return !kept_.empty(); }
  // Copies `tensors`, which are kept alive until restore() or forget().
  void keep(std::vector<at::Tensor> tensors);
  // They have the contents again that they had in keep(). Nothing where none are held.
  void restore();
  void forget() { kept_.clear(); }

 private:
  std::vector<at::Tensor> memory_;
  std::vector<at::Tensor> kept_;
};

}  // namespace ds::offload
