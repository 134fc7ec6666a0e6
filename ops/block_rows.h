// A layout of blocks by rows: for each row of blocks the columns that are kept.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "dsengine/sparsity_pattern.h"

namespace ds::ops {

// int64 on the CPU.
struct BlockRows {
  at::Tensor offsets;  // [heads of the layout * blocks + 1]
  at::Tensor columns;  // ascending in each row
};

// `causal`: without what is above the diagonal.
BlockRows block_rows(const BlockLayout& layout, bool causal);

// Blocks of queries of any head with about as many blocks of keys, for operators that take dense tensors.
struct RowGroup {
  at::Tensor rows;     // [rows of the group]: head * blocks + row, of all `heads`
  at::Tensor columns;  // [rows of the group, most columns of one]: blocks of keys; -1 where a row has fewer
};
// Groups differ in their number of columns by a third at least, so that little is computed in vain. Rows without
// columns are in none.
std::vector<RowGroup> row_groups(const BlockLayout& layout, int64_t heads, bool causal);

}  // namespace ds::ops
