// Dtypes of rules that compose an operator of others: those that the operator itself computes in and gives.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>

namespace ds::parallel {

// 16-bit floating: sums over ranks are made in float32, where they neither overflow nor lose what is small.
inline bool is_narrow(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }
inline at::ScalarType wide_type(at::ScalarType dtype) { return is_narrow(dtype) ? at::kFloat : dtype; }

inline bool under_autocast(const at::Tensor& x) { return at::autocast::is_autocast_enabled(x.device().type()); }

// The tensor that autocast gives to operators that it has on its list for float32. A rule stands above autocast, and
// operators that it composes are on other lists.
inline at::Tensor widened_by_autocast(const at::Tensor& x) {
  return is_narrow(x.scalar_type()) && under_autocast(x) ? x.to(at::kFloat) : x;
}

}  // namespace ds::parallel
