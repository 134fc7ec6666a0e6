// Embedding and EmbeddingBag layers whose table no rank has: what they read comes row by row.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace ds::layers {

// Returns rows of a table, [k, width], for their numbers, [k] int64, ascending, each once. Undefined: the table's own
// memory is to be read. It is called once for each read of the table, also where no row is read.
using ReadRows = std::function<at::Tensor(const at::Tensor& rows)>;

// While `rows` lives, LibTorch's operators `embedding` and `embedding_bag` take the rows of `weight`, which they know
// by its identity, from it, with and without a graph: each row once, for all the indices that name it. The gradient of
// the weight is then sparse and coalesced, without the row of padding_idx. Puts kernels in front of LibTorch's with the
// first call, for the rest of the process. Thread safe.
void read_by_rows(const at::Tensor& weight, const std::shared_ptr<const ReadRows>& rows);

}  // namespace ds::layers
