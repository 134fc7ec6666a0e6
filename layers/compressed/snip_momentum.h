// Pruning by |weight x gradient| (SNIP, Lee et al., arXiv:1810.02340) with momentum: method "snip_momentum" of
// sparse_pruning, as Intel's Neural Compressor has it. DeepSpeed 0.19.6 names it and cannot import it.
//
// In each optimizer step every block of a weight has its score multiplied by 0.9 and gets the mean of |weight x
// gradient| of its elements. Every `stride` steps the blocks with the least scores of all layers together leave, more
// and more of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "layers/compressed/methods.h"

namespace ds::model_compression {

// The share of all blocks that stays from the step on, counted from 0: dense_ratio^(k / changes) at change k. Empty:
// the step changes no mask.
std::optional<double> snip_dense_ratio(const Rule& rule, int64_t step);
// The share that the last change up to the step leaves, whether it is at the step or before. Empty: there was none.
std::optional<double> snip_due_ratio(const Rule& rule, int64_t step);
// Whether the gradient of the step counts: masks are still to change, and float32 can tell what is left of it then.
bool snip_counts(const Rule& rule, int64_t step);

// Whether blocks divide a weight: [outputs, inputs], or of a Conv2d [outputs, height x width x inputs].
bool has_blocks(const at::Tensor& weight, const BlockSize& block);
// [outputs / rows, inputs / columns], float32, or float64 of such values.
at::Tensor block_means(const at::Tensor& values, const BlockSize& block);
// The mask of the elements of a weight of these sizes, from a mask of blocks.
at::Tensor elements_of_blocks(const at::Tensor& blocks, const BlockSize& block, c10::IntArrayRef sizes);

// Score after a step, in place.
void follow_score(const at::Tensor& score, const at::Tensor& mean);
// Returns, from the scores of each layer, which blocks are the best ceil(ratio x all) of all layers together. Of each
// layer the best 2 % stay, so that none is empty. Of equal ones the first stay.
std::vector<at::Tensor> best_blocks(const std::vector<at::Tensor>& scores, double ratio);

}  // namespace ds::model_compression
