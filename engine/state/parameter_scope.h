// The scope of gathered_parameters(): which buckets are made whole, and what happens to changed values.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "dsengine/zero.h"
#include "engine/state/model_state.h"
#include "zero/gathered_scope.h"

namespace ds::engine {

// `state` outlives the scope; `closed`: called once, when it ends. Throws UsageError for a tensor that is no parameter
// of the model, and with a modifier rank for one that other stages have copies of.
zero::GatheredParameters::Scope scope_of_parameters(ModelState& state, const std::vector<at::Tensor>& parameters,
                                                    std::optional<int> modifier_rank, std::function<void()> closed);

// The parameters of a bucket were changed by the program, the same way on all ranks: the optimizer goes on from them.
void take_over_changes(const ModelState& state, size_t bucket);

}  // namespace ds::engine
