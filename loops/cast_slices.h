// Slices of parameters that are made anew from their masters for each gather: in another dtype, or beside the host's.
#pragma once

#include <ATen/core/Tensor.h>

#include "core/slices/slice_store.h"

namespace ds::loops {

// Of one bucket. Between two uses the slice has no memory, as in FSDP2: the master is all that a rank holds, and
// whatever an optimizer has made of it is what the next gather brings.
class CastSlices final : public SliceStore {
 public:
  explicit CastSlices(at::Tensor master) : master_(std::move(master)) {}

  at::Tensor allocate(int64_t numel, at::ScalarType dtype) override;
  void load(const at::Tensor& slice) override;
  // Elements that were changed go to the master; the others keep its precision.
  void unload(const at::Tensor& slice, bool changed) override;

 private:
  at::Tensor master_;
  int uses_ = 0;
  bool made_ = false;  // the first elements come from the master itself
};

// Slices in host memory that are their own masters.
class HostSlices final : public SliceStore {
 public:
  explicit HostSlices(bool pinned) : pinned_(pinned) {}
  at::Tensor allocate(int64_t numel, at::ScalarType dtype) override;

 private:
  bool pinned_;
};

}  // namespace ds::loops
