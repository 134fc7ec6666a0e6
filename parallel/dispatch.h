// Decides how an operator on split tensors is computed. One boxed fallback, registered in LibTorch's dispatcher under
// the key of split tensors, gets every such operator. Rules for single operators are in parallel/rules.
//
// A copy to the CPU for reading (printing, .cpu()) gives the full tensor, plain, and operators that would give a split
// parameter other memory throw. For the others the fallback takes the first of these ways that applies:
//
//   1. An argument is a partial sum, whose addends are still apart on the ranks: run_on_addends().
//   2. No argument is cut: LibTorch's operator runs on the full values, and run_uncut() keeps gradients right. A change
//      of a joined view throws.
//   3. A rule computes it (parallel/rules/rules.h), or sends the call to 5 (Outcome::kJoin).
//   4. LibTorch decomposes the operator into simpler ones (CompositeImplicitAutograd).
//   5. The full tensors are gathered and the operator runs on them, which is always right and costs memory.
//
// core/split/split_tensor.h explains split tensors, parallel/axis/axis.h the ranks that they are split over (the tensor
// axis). Operators on split tensors are collective: every rank of the axis calls them in the same order.
#pragma once

namespace ds::parallel {

// Registers the fallback for the rest of the process. Called for every axis of more than one rank; only the first call
// registers, and until then no operator pays for it. Any thread.
void register_split_operators();

}  // namespace ds::parallel
