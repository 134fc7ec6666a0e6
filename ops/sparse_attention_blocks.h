// Sparse attention of LibTorch's operators, for devices and dtypes without a kernel.
#pragma once

#include <ATen/core/Tensor.h>

#include "dsengine/sparse_attention.h"
#include "ops/attention_mask.h"

namespace ds::ops {

struct BlocksOptions {
  bool causal;
  double scale;
};

// As sparse_attention(), of plain tensors that fit; masks of the wide type. Differentiable, twice too. Keys and values
// are gathered for each block of queries: memory is in proportion to the blocks. Scores of 16-bit dtypes are rounded to
// them before the softmax, which is computed wide.
at::Tensor attention_of_blocks(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                               const BlockLayout& layout, const AddedMasks& masks, const BlocksOptions& options);

}  // namespace ds::ops
