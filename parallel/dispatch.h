// How operators on split tensors are computed: one boxed fallback under the key of split tensors, for all of them.
//
// In this order: on joined views as they are; by a rule; decomposed, where LibTorch itself composes the operator of
// others; else on joined tensors, which is always right. Operators on split tensors are collective: every rank of the
// axis calls them in the same order.
#pragma once

#include "parallel/axis/axis.h"

namespace ds::parallel {

// With the first axis longer than one rank the fallback is registered in LibTorch's dispatcher, for the rest of the
// process; before, no operator pays for it. Any thread.
void register_split_operators();

}  // namespace ds::parallel
