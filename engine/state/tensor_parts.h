// What an engine has when its model is split over a tensor axis (docs/tensor_parallel.md): the ranks of the axis, and
// the leaves, which alone it trains. The module keeps its parameters, which have no memory then.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "core/split_tensor.h"
#include "dsengine/comm.h"
#include "dsengine/parallel.h"

namespace ds::engine {

struct TensorParts {
  std::shared_ptr<comm::Communicator> ranks;  // along the axis: each has a part of the split parameters
  parallel::SplitModule split;                // axis, plan, leaves under the names of their parameters
};

// What the engine trains of a module's parameter: the leaf of a split one, and others themselves. Buckets, optimizer
// and everything else by identity know a parameter by it.
inline at::Tensor trained_tensor(const at::Tensor& parameter) {
  return is_split(parameter) ? leaf_of(parameter) : parameter;
}

}  // namespace ds::engine
