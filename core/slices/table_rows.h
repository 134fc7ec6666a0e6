// Some rows of a table in place of the table.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>

namespace ds {

struct TableRows {
  at::Tensor rows;    // [k] int64: their numbers in the table, or in the slice of it that is meant
  at::Tensor values;  // [k, width]
};

// Returns the rows of a sparse tensor with one sparse dimension. They share its memory.
inline TableRows rows_of(const at::Tensor& sparse) {
  return {.rows = sparse._indices().reshape({-1}), .values = sparse._values()};
}

// Returns a sparse tensor of the sizes of a table; it shares the memory of `rows`. `coalesced`: each row comes once, in
// ascending order.
inline at::Tensor sparse_of(const TableRows& rows, at::IntArrayRef sizes, bool coalesced) {
  return at::_sparse_coo_tensor_unsafe(rows.rows.unsqueeze(0), rows.values, sizes,
                                       rows.values.options().layout(at::kSparse), coalesced);
}

}  // namespace ds
