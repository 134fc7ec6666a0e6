// The number of multiplications and additions of an operator, from its name and inputs.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>

namespace ds::profiling {

// Operations as hardware vendors count them: a multiplication and an addition are two, or one multiply-accumulate
// (MAC).
struct OperatorWork {
  int64_t macs = 0;   // those of products of matrices, convolutions and attention
  int64_t flops = 0;  // twice those, and those of all else
  // Parts of `macs`: what backward of attention spends on scores that forward had, and beside it what a causal
  // mask makes useless, which is half of it.
  int64_t repeated_macs = 0;
  int64_t masked_macs = 0;

  OperatorWork& operator+=(const OperatorWork& other) {
    macs += other.macs;
    flops += other.flops;
    repeated_macs += other.repeated_macs;
    masked_macs += other.masked_macs;
    return *this;
  }
};

// The work of one call of an operator ("aten::addmm"). Empty: there is no rule, and the operators that it calls count.
// Products count as they are done, also in backward: two for a linear layer's two gradients. Attention counts all
// pairs, masked ones too; its backward counts five products, since it computes the scores again. Normalisation counts 5
// an element (4 without affine parameters; twice as many in backward), pointwise operators, softmax and pooling 1;
// lookups, copies and sums none. These are the rules of DeepSpeed's profiler
// (deepspeed/profiling/flops_profiler/profiler.py), where it has one.
std::optional<OperatorWork> work_of(const char* name, c10::ArrayRef<const c10::IValue> inputs);

}  // namespace ds::profiling
