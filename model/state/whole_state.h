// Full (unsharded) parameters and masters of a model, gathered from the ranks that have parts of them. All functions
// are collective.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "model/state/model_state.h"

namespace ds::engine {

// Calls `use`, at stage 3, for each bucket from `first` on (trainable ones, then frozen ones) while its parameters are
// gathered. Without stage 3, where all parameters are full anyway, it is never called.
// `wanted`, the same on all ranks: buckets for which it is false are not gathered; empty: all are.
void for_each_whole_bucket(const ModelState& state, size_t first,
                           const std::function<void(const zero::ParameterBucket&)>& use,
                           const std::function<bool(const zero::ParameterBucket&)>& wanted = {});

// Gathers a whole bucket (trainable ones, then frozen ones), [layout.numel], on the device and in new memory, from this
// rank's part of it, which has an element for each of its slice's. Collective over the ranks that have the bucket's
// slices. `label`: what the exchange is called.
at::Tensor joined_slices(const ModelState& state, size_t bucket, const at::Tensor& own, const std::string& label);

// Gathers all ranks' masters of a bucket, in their dtype [layout.numel], on the device.
at::Tensor whole_master(const ModelState& state, size_t bucket);

// Gathers the full parameter of which `values` are this rank's part, on their device; `values` themselves where it is
// not split. Collective over the tensor axis.
at::Tensor joined_over_axis(const ModelState& state, const zero::Parameter& parameter, const at::Tensor& values);

// Returns parameters and buffers by name, on the host, in the model's dtype.
std::vector<std::pair<std::string, at::Tensor>> whole_module(const ModelState& state);

// Returns float32 weights by name, on the host: masters of what is trained (a tied weight once), then frozen
// parameters. A rank that does not want them takes part, holds one bucket at a time, and gets an empty list.
std::vector<std::pair<std::string, at::Tensor>> whole_masters(const ModelState& state, bool wanted = true);
// Returns the moving averages in place of the masters (ModelState::average).
std::vector<std::pair<std::string, at::Tensor>> whole_averages(const ModelState& state);

}  // namespace ds::engine
