// The two halves of parallelize_module, for whoever brings parameters with values of its own, and a plan.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/split/split_tensor.h"
#include "dsengine/parallel.h"

namespace ds::parallel {

// The plan for all parameters of a module, in its order; names of one tensor agree. `elsewhere`: parameters of layers
// that other stages of a pipeline have, for which rules may be meant; their plan follows that of the module's. Throws
// UsageError as parallelize_module.
SplitPlan plan_module(const torch::nn::Module& module, const std::vector<SplitRule>& rules, int ranks,
                      const std::vector<NamedShape>& elsewhere = {});

// This rank's part of a parameter, in memory of its own, which becomes the leaf.
using PartOf = std::function<at::Tensor(const std::string& name, const at::Tensor& parameter, const Placement&)>;

// Splits the module as the plan of its parameters says. `part_of` is called for each split tensor once, in the order of
// the module, just before the tensor loses its memory. Runs no collective but what `part_of` does.
SplitModule split_module(torch::nn::Module& module, std::shared_ptr<Axis> axis, SplitPlan plan, const PartOf& part_of);

// Splits the module with rank 0's values, and makes mistakes with gradients of split parameters errors: what
// parallelize_module does with a plan. Collective.
SplitModule split_with_values_of_rank_0(torch::nn::Module& module, const std::shared_ptr<Axis>& axis, SplitPlan plan);

}  // namespace ds::parallel
