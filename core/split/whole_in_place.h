// Shows a split parameter as a plain, full tensor for a while: for programs that read and write its memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

namespace ds {

// The state that made a parameter a split one; opaque.
using SplitState = c10::intrusive_ptr<c10::BackendMeta>;

// Makes a split parameter (core/split/split_tensor.h) a plain tensor in place, with the memory of `whole`: of its
// sizes, dtype and device. Operators may read and change it. A gradient that arrives at it would miss its part, so that
// one throws a UsageError that names the parameter, also after split_again(). Local; throws UsageError for another
// tensor.
[[nodiscard]] SplitState make_whole(const at::Tensor& parameter, const at::Tensor& whole);

// Makes the parameter a split one again, with its leaf's values; the tensor that it showed is dropped, whatever it is
// by now.
void split_again(const at::Tensor& parameter, SplitState state);

}  // namespace ds
