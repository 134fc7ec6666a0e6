// What every operator can do: its tensors are joined, and each rank computes the whole.
#pragma once

#include "parallel/rules/call.h"

namespace ds::parallel {

// Counts the join. A split tensor that the operator changes gets its part of the change. A result that is a view of a
// joined tensor is a split tensor without a cut, which refuses changes. Throws UsageError for operators that change a
// split tensor's sizes or memory in place.
void join_operands(Call& call);
// An operator whose split operands have no cut.
void run_uncut(Call& call);

// Calls `change` for every split tensor among the arguments, also in lists, and puts what it returns in its place.
void replace_split_arguments(const Call& call, const std::function<at::Tensor(const at::Tensor&)>& change);

}  // namespace ds::parallel
