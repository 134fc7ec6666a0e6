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

// How the losses of all rows become one.
enum class LossReduction { kMean, kSum };

// Options of linear_cross_entropy().
struct LinearCrossEntropyOptions {
  LossReduction reduction = LossReduction::kMean;  // kMean: over the targets that are not ignored
  int64_t ignore_index = -100;                     // targets of this value count for nothing
  double label_smoothing = 0.0;                    // in [0, 1]: share of the target that is spread over all classes
  double logit_scale = 1.0;                        // logits are multiplied by it
  std::optional<double> logit_softcap;  // c > 0: logits become c tanh(logits / c), after the scale (Gemma 2's)
  // Rows (positions) whose logits are in memory at once; 0: as many as give 2^23 logits on a CPU (16-bit dtypes:
  // 2^24) and 2^27 on other devices, but at least 128. The result depends on it in the last bits only.
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
// For those who watch operators it is one, dsengine::linear_cross_entropy, whatever the number of rows.
//
// One pass: forward takes chunks of rows and, where a gradient is wanted, makes the gradients of hidden, weight and
// bias at once, so that backward only multiplies them. What is in memory:
//
//   while it runs      2 chunk_rows V elements of float32 (16-bit dtypes: 2 bytes more each), with logit_softcap 3;
//                      bfloat16 in several chunks: V H elements of it more, a chunk's gradient of weight;
//                      under autocast: V H elements of 16 bits more, the cast weight
//   until backward     the gradients: hidden's in the dtype of the product, weight's and bias's in float32 (float64;
//                      weight's in bfloat16 where one chunk made it)
//   in backward        the weight's gradient in the weight's dtype, where that is another one
//
// where the plain pair keeps two tensors of [rows, V] until backward and makes a third in it. Backward reads no weight.
//
// Gradients are made before a loss scale can act on them. None overflows because of it. But in float16 hidden's
// gradient is made of probabilities, and elements below 2^-24 (before the mean) are 0, whatever the loss scale is.
//
// The chunks of rows with gradients in forward are those of Liger Kernel (arXiv:2410.10989); Cut Cross-Entropy
// (arXiv:2411.09009) goes further with kernels that keep no chunk either.
//
// For tensors that are split over ranks (dsengine/parallel.h) the plain pair is computed. Where the vocabulary is cut,
// each rank has its part of the logits for all rows at once.
//
// Double backward is refused: backward with create_graph throws UsageError. Classes have no weights of their own, and
// targets no probabilities; cross_entropy_loss has both.
//
// Throws UsageError as above, on a CPU for a target outside of [0, V) too; other devices report that as their gather()
// does.
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& bias,
                                const at::Tensor& targets, const LinearCrossEntropyOptions& options = {});

// The operators below run as kernels for float32, bfloat16, float16 (float32 inside) and float64, forward and backward
// in one pass each: on a CPU as vector kernels on LibTorch's threads, on CUDA as those of libdsengine_cuda. On other
// devices, without that library, and for float16 on a CPU they are LibTorch's operators. Results have the dtype of x;
// tensors that are not contiguous are copied where a kernel needs it. They save their inputs for backward, as said.
// Double backward of the kernels is refused: backward with create_graph throws UsageError, which also tells of a kernel
// that cannot be started on the device. Autocast changes nothing.

// RMSNorm (arXiv:1910.07467) over the last dimension: x / sqrt(mean(x^2) + eps) * weight.
//
//   x       [..., size]
//   weight  [size] of any floating dtype, or undefined: ones
//
// Saves x and one number a row.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps = 1e-6);

// LayerNorm (arXiv:1607.06450) over the last dimension: (x - mean) / sqrt(variance + eps) * weight + bias; weight and
// bias [size] or undefined. Saves x and two numbers a row.
at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps = 1e-5);

// The result of add_rms_norm() and add_layer_norm().
struct NormedSum {
  at::Tensor normed;  // the norm of `sum`
  at::Tensor sum;     // x + residual, the residual of the next sublayer
};

// The norms after an addition, as between two sublayers of a transformer; residual has the shape of x, dtypes that
// differ are promoted as by an addition. One pass over memory where the pair takes two, forward and backward. They save
// the sum in the place of x.
NormedSum add_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, double eps = 1e-6);
NormedSum add_layer_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                         const at::Tensor& bias, double eps = 1e-5);

// SwiGLU (arXiv:2002.05202): silu(gate) * up, of one shape; dtypes that differ are promoted as by a product. Saves
// both; the chain saves silu(gate) too.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);
// [..., 2 F] -> [..., F]: gate is the first half of the last dimension, up the second. Its gradient is one tensor.
at::Tensor swiglu(const at::Tensor& gate_up);

// Which two channels are turned together.
enum class RopePairs {
  kHalves,       // i and i + pairs: GPT-NeoX, Hugging Face's Llama
  kInterleaved,  // 2 i and 2 i + 1: RoFormer, GPT-J, Meta's Llama
};

// Options of rope().
struct RopeOptions {
  RopePairs pairs = RopePairs::kHalves;
  int64_t position_dim = -2;  // the dimension of x that counts positions; -2: [..., positions, channels]
};

// Rotary position embedding (RoFormer, arXiv:2104.09864).
//
//   x         [..., positions, ..., channels], two dimensions or more; copied unless the last one is contiguous.
//             A part of a packed query-key-value tensor is not copied.
//   cos, sin  [P, pairs] with P >= positions and 2 pairs <= channels; channels beyond 2 pairs stay as they are.
//             No gradient: they must not require one; float32 (float64) inside.
//
// Saves the tables alone. The result is a tensor of its own, with the order of dimensions in memory that x has.
at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, const RopeOptions& options = {});

// The tables of rope().
struct RopeTables {
  at::Tensor cos, sin;  // [positions, channels / 2]
};

// Makes cosines and sines of the angles p base^(-2 i / channels), computed in float64.
RopeTables rope_tables(int64_t positions, int64_t channels, double base = 10000.0,
                       const at::TensorOptions& options = at::kFloat);

}  // namespace ds::ops
