// sparse_attention() with what earlier calls have read of its layout.
#pragma once

#include <ATen/core/Tensor.h>

#include "dsengine/sparse_attention.h"
#include "ops/block_rows.h"

namespace ds::ops {

at::Tensor attention_of_layout(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                               const LayoutRows& rows, const SparseAttentionOptions& options);

}  // namespace ds::ops
