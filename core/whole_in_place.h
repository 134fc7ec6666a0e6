// A split parameter as a plain tensor for a while: for programs that read and write its memory.
#pragma once

#include <ATen/core/Tensor.h>

namespace ds {

// Makes a split parameter (core/split_tensor.h) a plain tensor in place, with the memory of `whole`: of its sizes, dtype
// and device. Operators may read and change it. A gradient that arrives at it would miss its part, so that one throws a
// UsageError that names the parameter, also after split_again(). Local; throws UsageError for another tensor.
void make_whole(const at::Tensor& parameter, const at::Tensor& whole);

// The split parameter as it was, with its leaf's values; what it showed is dropped.
void split_again(const at::Tensor& parameter);

}  // namespace ds
