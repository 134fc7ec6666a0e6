// Masks of attention as numbers that are added to scores.
#pragma once

#include <ATen/core/Tensor.h>

#include "dsengine/sparse_attention.h"

namespace ds::ops {

struct AddedMasks {
  at::Tensor keys;    // [batch, time], contiguous, or undefined
  at::Tensor scores;  // [batch or 1, heads or 1, time, time], its last dimension side by side, expanded as the
                      // program's, or undefined
};

// Throws UsageError, naming `name`, for masks that do not fit a query on `device` of the sizes [batch, heads, time,
// channels].
void check_masks(const char* name, at::IntArrayRef sizes, const at::Device& device,
                 const SparseAttentionOptions& options);

// Makes masks that are added, of `type`, out of masks that fit (check_masks); -inf where a key is left out. Throws
// UsageError, naming `name`, for a mask that requires a gradient, and for one of kAdd that has no numbers.
AddedMasks added_masks(const char* name, const SparseAttentionOptions& options, at::ScalarType type);

}  // namespace ds::ops
