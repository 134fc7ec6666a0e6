// Operators for parts of a model that LibTorch computes with more memory or more passes than they need. Optional: the
// engine trains any module, with these or without.
//
//   const at::Tensor loss = ds::ops::linear_cross_entropy(hidden, head->weight, {}, targets);
//
// All of them build graphs as LibTorch's own operators do, and read tensors in a way that ZeRO stage 3 and activation
// checkpointing see. Double backward (create_graph) is refused where it is said so.
//
// Threads: no state but the tensors'; they may be called from any thread. Errors: UsageError for shapes, dtypes and
// devices that do not fit, with what was expected and found. docs/ops.md has what they save, measured.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace ds::ops {

enum class LossReduction { kMean, kSum };

struct LinearCrossEntropyOptions {
  LossReduction reduction = LossReduction::kMean;  // kMean: over the targets that are not ignored
  int64_t ignore_index = -100;                     // targets of this value count for nothing
  double label_smoothing = 0.0;                    // in [0, 1]: share of the target that is spread over all classes
  double logit_scale = 1.0;                        // logits are multiplied by it
  std::optional<double> logit_softcap;  // c > 0: logits become c tanh(logits / c), after the scale (Gemma 2's)
  // Rows (positions) whose logits are in memory at once; 0: as many as give 2^24 logits on a CPU and 2^27 on other
  // devices, but at least 128. The result depends on it in the last bits only.
  int64_t chunk_rows = 0;
};

// cross_entropy(linear(hidden, weight, bias), targets), with logits that are never whole.
//
//   hidden   [..., H]   float32, float64, bfloat16 or float16
//   weight   [V, H]     of the same dtype and device; may be a tied embedding
//   bias     [V] or undefined
//   targets  [...]      int64, the shape of hidden without its last dimension; values in [0, V) or ignore_index
//   result   []         float32 (float64 for float64)
//
// As LibTorch's cross_entropy_loss, the mean of no targets is NaN, and gradients are 0 then. Softmax and sums over rows
// are done in float32 (float64 for float64). Under autocast, hidden, weight and bias are cast as at::linear casts them.
//
// One pass: forward takes chunks of rows and, where a gradient is wanted, makes the gradients of hidden, weight and
// bias at once, so that backward only multiplies them. What is in memory:
//
//   while it runs      2 chunk_rows V elements of float32 (16-bit dtypes: 2 bytes more each)
//   until backward     the gradients: hidden's in the dtype of the product, weight's and bias's in float32 (float64)
//
// where the plain pair keeps two tensors of [rows, V] until backward and a third in it. Gradients are made in forward
// with weights that one reads there anyway, so that ZeRO stage 3 gathers the weight once where it took two.
//
// The chunks of rows with gradients in forward are those of Liger Kernel (arXiv:2410.10989); Cut Cross-Entropy
// (arXiv:2411.09009) goes further with kernels that keep no chunk either.
//
// Double backward is refused: backward with create_graph throws UsageError. Classes have no weights of their own, and
// targets no probabilities; cross_entropy_loss has both.
//
// Throws UsageError as above, on a CPU for a target outside of [0, V) too; other devices report that as their gather()
// does.
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& bias,
                                const at::Tensor& targets, const LinearCrossEntropyOptions& options = {});

}  // namespace ds::ops
