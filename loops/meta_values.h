// Modules on the meta device: their slices are made before they have values.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <cstddef>

#include "loops/sharded_model.h"
#include "zero/parameter_bucket.h"

namespace ds::loops {

// Parameters and buffers.
size_t count_on_meta(const torch::nn::Module& module);

// Of a tensor on the meta device what nobody takes for a value, NaN, on `device`; undefined for another one. Throws
// UsageError, naming it, for a buffer whose dtype has none.
at::Tensor no_values(const zero::Parameter& tensor, c10::Device device);

// Throws UsageError, on all ranks, where slices or buffers have got no values since. Collective.
void require_values(const ShardedModel& model);

}  // namespace ds::loops
