// Reduced gradients of slices: from the reducer, at the end of a pass, to .grad of the leaves that an optimizer has.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "core/slices/reduced_gradients.h"
#include "loops/slice_leaves.h"
#include "zero/parameter_bucket.h"

namespace ds::loops {

// What a pass has made stays apart until all ranks' is there: replicas average it, and what .grad held before is an
// average already.
class SliceGradients final : public ReducedGradients {
 public:
  // Of so many buckets, whose slices' gradients are of this dtype and on this device.
  void expect(size_t buckets, const at::TensorOptions& options);

  bool takes(size_t /*bucket*/) const override { return true; }
  void add(size_t bucket, const at::Tensor& own) override;
  at::Tensor gradient(size_t bucket) override { return of_pass_[bucket]; }
  void clear() override;

  // Adds what the pass has made to the leaves' gradients, and forgets it. Of one of `parameters`, which leaves name by
  // number, that has been frozen since the leaf keeps what it has, as in torch.
  void hand_out(const std::vector<SliceLeaf>& leaves, const std::vector<zero::Parameter>& parameters);

 private:
  std::vector<at::Tensor> of_pass_;  // per bucket, flat
  at::TensorOptions options_;
};

}  // namespace ds::loops
