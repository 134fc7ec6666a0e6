// Gradients of summed parameters (Placement::summed), of which each rank has a part until they are added up.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "parallel/axis/axis.h"

namespace ds::parallel {

// The summed gradients of one module; knows whether backward passes have left parts since the last sum.
class SummedGradients {
 public:
  explicit SummedGradients(std::shared_ptr<Axis> axis) : axis_(std::move(axis)) {}

  // Adds the gradients of `leaf` to those that reduce() adds up.
  void watch(std::string name, const at::Tensor& leaf);
  // Adds up, in one all-reduce for each dtype (16-bit gradients in float32), and leaves the sums in the leaves' .grad.
  // Nothing where no gradient has arrived since the last time. Collective.
  void reduce();

 private:
  struct Watched {
    std::string name;
    at::Tensor leaf;
    bool whole = false;  // .grad has been added up
  };
  struct State {
    std::vector<Watched> leaves;
    bool pending = false;
  };
  static void note_gradient(State& state, size_t leaf);
  void reduce_leaves(const std::vector<Watched*>& leaves);

  std::shared_ptr<Axis> axis_;
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace ds::parallel
