// The scope of gathered_parameters(): which buckets are made whole, and what happens to changed values.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "dsengine/zero.h"
#include "model/state/model_state.h"
#include "zero/gather/gathered_scope.h"

namespace ds::engine {

// Makes the scope, without `closed`, which is the caller's. `state` outlives the scope. Throws UsageError for a tensor
// that is no parameter of the model, and with a modifier rank for one that other stages have copies of.
zero::GatheredParameters::Scope scope_of_parameters(ModelState& state, const std::vector<at::Tensor>& parameters,
                                                    std::optional<int> modifier_rank);

// Throws UsageError for a parameter that other stages of a pipeline have copies of, which would keep the old values.
// `call` names the call and what it expected.
void require_on_one_stage(const ModelState& state, const std::vector<at::Tensor>& parameters, const char* call);

// Lets the optimizer go on from the parameters of a bucket that the program has changed, the same way on all ranks.
// Keeps the masters that lose their place (ModelState::overwritten) and puts them back where the parameters are the old
// ones.
void take_over_changes(ModelState& state, size_t bucket);

}  // namespace ds::engine
