// How operators on split tensors are computed: one boxed fallback under the key of split tensors, for all of them.
//
// For each operator, the first that applies:
//
//   1. an argument is a partial sum, whose addends are still apart on the ranks: run_on_addends()
//   2. no argument is cut: LibTorch's operator as it is
//   3. our rule (parallel/rules)
//   4. LibTorch's own decomposition into simpler operators
//   5. the full tensors are gathered and the operator runs on these: always right, and costs memory
//
// Split tensors are explained in core/split/split_tensor.h, their axis in parallel/axis/axis.h. Operators on split
// tensors are collective: every rank of the axis calls them in the same order.
#pragma once

#include "parallel/axis/axis.h"

namespace ds::parallel {

// Registers the fallback in LibTorch's dispatcher, for the rest of the process. Called with the first axis longer than
// one rank; before, no operator pays for it. Any thread.
void register_split_operators();

}  // namespace ds::parallel
