// SwiGLU (arXiv:2002.05202) of arrays, forward and backward: y = gate sigmoid(gate) up. Torch-free.
#pragma once

#include <cstdint>

#include "ops/kernels/float_type.h"

namespace ds::ops {

// Arrays of `count` elements of `type`.
struct SwigluForward {
  FloatType type = FloatType::kFloat32;
  const void* gate = nullptr;
  const void* up = nullptr;
  void* output = nullptr;
};

void swiglu_forward(const SwigluForward& arrays, int64_t count);

// dgate = dy up s (1 + gate (1 - s)) with s = sigmoid(gate), dup = dy gate s.
struct SwigluBackward {
  FloatType type = FloatType::kFloat32;
  const void* output_gradient = nullptr;
  const void* gate = nullptr;
  const void* up = nullptr;
  void* gate_gradient = nullptr;
  void* up_gradient = nullptr;
};

void swiglu_backward(const SwigluBackward& arrays, int64_t count);

}  // namespace ds::ops
