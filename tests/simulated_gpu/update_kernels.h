// What the kernels of updates have in common on the simulated GPU.
#pragma once

#include <cstdint>

#include "core/numbers/float_bits.h"
#include "optim/device_kernels.h"

namespace ds::simulated_gpu {

inline float value_at(const void* data, FloatFormat type, int64_t i) {
  return with_float_format(type, [&](auto format) {
    using Format = decltype(format);
    return Format::decode(static_cast<const typename Format::Bits*>(data)[i]);
  });
}

inline void put_value(void* data, FloatFormat type, int64_t i, float value) {
  with_float_format(type, [&](auto format) {
    using Format = decltype(format);
    static_cast<typename Format::Bits*>(data)[i] = Format::encode(value);
  });
}

// lamb_kernels.cc
const char* give_lamb_advance(const optimizers::LambRun* runs, int64_t count, const optimizers::UpdateScale& scale,
                              const optimizers::LambSums& sums, void* stream);
const char* give_lamb_apply(const optimizers::LambRun* runs, int64_t count, const optimizers::UpdateScale& scale,
                            const optimizers::LambSums& sums, void* stream);

}  // namespace ds::simulated_gpu
