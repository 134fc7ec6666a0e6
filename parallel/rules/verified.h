// The proof of a rule on the program's own tensors: its result, and what it gives as gradients, against the operator on
// joined tensors.
#pragma once

#include "parallel/rules/call.h"

namespace ds::parallel {

// Computes the call at hand twice on copies of its arguments, by the rule and on the wholes, and compares the results
// and, where there are gradients, those of all operands for one gradient of the results. Leaves the call as it is.
// A gradient that does not arrive counts as zeros; NaN and infinite values must be in the same places. Operators that
// draw random numbers or leave memory as it is, and calls that the rule leaves to others, are not compared. Collective;
// all ranks come to the same conclusion. Throws InternalError naming the operator.
void verify_rule(const Rule& rule, const Call& call);
// Whether this thread is in verify_rule: what it calls is not verified again.
bool is_verifying();

}  // namespace ds::parallel
