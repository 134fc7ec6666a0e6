// What every operator can do: its tensors are joined, and each rank computes the whole.
#pragma once

#include "parallel/rules/call.h"

namespace ds::parallel {

// Counts the join. A split tensor that the operator changes gets its part of the change. A result that is a view of a
// joined tensor is a split tensor without a cut, which refuses changes. Throws UsageError for operators that change a
// split tensor's sizes or memory in place.
void join_operands(Call& call);
// An operator whose split operands have no cut. Of summed tensors alone it makes summed ones; beside others that have a
// gradient they get one T-th of theirs.
void run_uncut(Call& call);

// An operator with addends among its operands: what is linear in them gives one, for others they are added up.
void run_on_addends(Call& call);

// Calls `change` for every split tensor among the arguments, also in lists, and puts what it returns in its place.
void replace_split_arguments(const Call& call, const std::function<at::Tensor(const at::Tensor&)>& change);

}  // namespace ds::parallel
