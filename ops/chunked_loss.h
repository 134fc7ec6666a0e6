// Cross entropy of a linear layer, chunk by chunk of its rows, with its gradients. Builds no graph.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "dsengine/ops.h"
#include "ops/vector_types.h"

namespace ds::ops {

// What the loss and its gradients are made of.
struct ChunkedLossInput {
  at::Tensor hidden;                 // [N, H]
  at::Tensor weight;                 // [V, H]
  at::Tensor bias;                   // [V] or undefined
  at::Tensor targets;                // int64 [N]
  at::ScalarType type = at::kFloat;  // of the products: hidden, weight and bias are cast to it
  LinearCrossEntropyOptions options;
};

struct WantedGradients {
  bool hidden = false;
  bool weight = false;
  bool bias = false;
  bool any() const { return hidden || weight || bias; }
};

// Gradients are those of the sum of the losses of rows by the logits before their scale: they are to be multiplied by
// logit_scale and, for the mean, divided by the number of targets. So they are of the size of a probability times a
// weight, whatever N and the loss scale are, and fit into float16.
struct ChunkedLoss {
  at::Tensor total;            // [] sum over rows, in wide_type()
  at::Tensor counted;          // [] int64: targets that are not ignored
  at::Tensor hidden_gradient;  // [N, H] in `type`; undefined where not wanted, as the next two
  at::Tensor weight_gradient;  // [V, H] in wide_type(); bfloat16 where one chunk made it
  at::Tensor bias_gradient;    // [V] in wide_type()
};

// Gradients off (at::NoGradGuard or inside of a Function's forward).
ChunkedLoss chunked_loss(const ChunkedLossInput& input, const WantedGradients& wanted);

}  // namespace ds::ops
