// How many multiplications and additions an operator takes, from its name and inputs.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>

namespace ds::profiling {

// Operations as hardware vendors count them: a multiplication and an addition are two, or one multiply-accumulate
// (MAC).
struct OperatorWork {
  int64_t macs = 0;   // of products of matrices, convolutions and attention
  int64_t flops = 0;  // twice those, and those of all else

  OperatorWork& operator+=(const OperatorWork& other) {
    macs += other.macs;
    flops += other.flops;
    return *this;
  }
};

// Of one call of an operator ("aten::addmm"). Empty: there is no rule, and what it calls counts. Products count as they
// are done, also in backward: two for a linear layer's two gradients. Attention counts all pairs, masked ones too;
// its backward five products, since it computes the scores again. Normalisation 5 an element (4 without affine
// parameters; twice as many in backward), pointwise operators, softmax and pooling 1; lookups, copies and
// sums none. Those of DeepSpeed's profiler (deepspeed/profiling/flops_profiler/profiler.py), where it has a rule.
std::optional<OperatorWork> work_of(const char* name, c10::ArrayRef<const c10::IValue> inputs);

}  // namespace ds::profiling
