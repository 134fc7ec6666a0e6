// Whole parameters and masters of a model, put together from the ranks that have parts of them. All collective.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "model/state/model_state.h"

namespace ds::engine {

// Stage 3: calls `use` for each bucket from `first` on (trainable ones, then frozen ones) while its parameters are
// whole.
void for_each_whole_bucket(const ModelState& state, size_t first,
                           const std::function<void(const zero::ParameterBucket&)>& use);

// From this rank's part of a bucket (trainable ones, then frozen ones), which has an element for each of its slice's,
// the whole [layout.numel], on the device; new memory. Collective over the ranks that have the bucket's slices.
// `label`: what the exchange is called.
at::Tensor joined_slices(const ModelState& state, size_t bucket, const at::Tensor& own, const std::string& label);

// All ranks' masters of a bucket, in their dtype [layout.numel], on the device.
at::Tensor whole_master(const ModelState& state, size_t bucket);

// The whole of a parameter of which `values` are this rank's part, on their device; `values` themselves where it is not
// split. Collective over the tensor axis.
at::Tensor joined_over_axis(const ModelState& state, const zero::Parameter& parameter, const at::Tensor& values);

// Parameters and buffers by name, on the host, in the model's dtype.
std::vector<std::pair<std::string, at::Tensor>> whole_module(const ModelState& state);

// float32 weights by name, on the host: masters of what is trained (a tied weight once), then frozen parameters. A rank
// that does not want them takes part, holds one bucket at a time, and gets an empty list.
std::vector<std::pair<std::string, at::Tensor>> whole_masters(const ModelState& state, bool wanted = true);

}  // namespace ds::engine
