// Stand-ins for the gradients of a sharded module's own parameters, which are reduced into those of the slices.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

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

}  // namespace ds::loops
