// Sparse attention of LibTorch's operators, for devices and dtypes without a kernel.
#pragma once

#include <ATen/core/Tensor.h>

#include "dsengine/sparse_attention.h"
#include "ops/attention_mask.h"
#include "ops/block_rows.h"

namespace ds::ops {

struct BlocksOptions {
  bool causal;
  double scale;
};

// Computes sparse_attention() by LibTorch's operators, of plain tensors that fit; masks of the wide type.
// Differentiable, twice too. Keys and values are gathered for each block of queries: memory is in proportion to the
// blocks. Scores and softmax are computed wide, also of 16-bit dtypes, to which weights are rounded before they meet
// values.
at::Tensor attention_of_blocks(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                               const LayoutRows& rows, const AddedMasks& masks, const BlocksOptions& options);

}  // namespace ds::ops
