// A rank's slices as leaf tensors, which an optimizer of the program updates; how gradients get into their .grad, and
// what the module's own parameters have there in place of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "core/slices/reduced_gradients.h"
#include "core/slices/segment.h"
#include "model/state/model_state.h"
#include "zero/parameter_bucket.h"

namespace ds::loops {

// Puts tensors into .grad of parameters that throw when their memory is read, with what to do in place of that. They
// are there between passes alone: autograd would add to them.
class GradientMarks {
 public:
  // `parameters`, which require gradients, outlive it. Hooks on them take the marks away before a backward pass adds to
  // the gradients.
  explicit GradientMarks(const std::vector<zero::Parameter>& parameters);
  // Removes the hooks and the marks.
  ~GradientMarks();
  GradientMarks(const GradientMarks&) = delete;
  GradientMarks& operator=(const GradientMarks&) = delete;

  // Marks the parameters that have no gradient.
  void put();
  // Takes the marks away; gradients that others have put in their place stay.
  void take_away();
  // Whether there are marks.
  bool present() const { return !marks_.empty(); }

 private:
  const std::vector<zero::Parameter>& parameters_;
  std::vector<at::Tensor> marks_;
  std::vector<std::pair<at::Tensor, unsigned>> hooks_;  // by parameter
};

// This rank's part of a trained parameter: a flat view of the master of its bucket, perhaps without elements.
struct SliceLeaf {
  std::string name;
  size_t parameter = 0;  // its number in the model
  size_t bucket = 0;
  Segment place;  // in the slice
  at::Tensor tensor;
};

// One for each trained parameter, in module order, the same on every rank but for their places.
std::vector<SliceLeaf> slice_leaves(const engine::ModelState& state);

// Takes reduced gradients of slices from the reducer and, at the end of a pass, adds them to .grad of the leaves. The
// gradients of a pass stay apart until those of all ranks are there: replicas average them, and what .grad held before
// is an average already.
class SliceGradients final : public ReducedGradients {
 public:
  // Prepares for so many buckets, whose slices' gradients have this dtype and lie on this device.
  void expect(size_t buckets, const at::TensorOptions& options);

  bool takes(size_t /*bucket*/) const override { return true; }
  void add(size_t bucket, const at::Tensor& own) override;
  at::Tensor gradient(size_t bucket) override { return of_pass_[bucket]; }
  void clear() override;

  // Adds the gradients of the pass to those of the leaves, and forgets them. `parameters`: the tensors that leaves name
  // by number; the leaf of one that has been frozen since keeps the gradient it has, as in torch.
  void hand_out(const std::vector<SliceLeaf>& leaves, const std::vector<zero::Parameter>& parameters);

 private:
  std::vector<at::Tensor> of_pass_;  // per bucket, flat
  at::TensorOptions options_;
};

}  // namespace ds::loops
