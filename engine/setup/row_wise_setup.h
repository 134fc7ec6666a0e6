// Which tables of a model are row-wise: Note [Row-wise tables] in model/state/row_wise.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/setup/optimizer_setup.h"
#include "model/state/model_layout.h"
#include "model/state/model_state.h"

namespace ds::engine {

// Returns, by trainable parameter, the width of a row-wise table's rows, else 0. The weights of Embedding and
// EmbeddingBag layers with sparse(true) are row-wise where plan, optimizer and parameter group allow it. Rows of the
// plan name these tables, and the others with the reason; a large one of the others is warned of. Throws ConfigError
// where SparseAdam has a sparse table that cannot be row-wise: its rows would move without a gradient.
std::vector<int64_t> choose_row_wise_tables(ModelState& model, const ModelParameters& parameters,
                                            const OptimizerGroups& groups);

// Returns lines "what<TAB>value" for require_same_on_all_ranks(): the row-wise tables.
std::string row_wise_lines(const std::vector<int64_t>& widths, const ModelParameters& parameters);

}  // namespace ds::engine
