// What the kernels of updates have in common on the simulated GPU.
#pragma once

#include <cstdint>

#include "core/float_bits.h"
#include "optim/device_kernels.h"
#include "tests/simulated_gpu/timeline.h"

namespace ds::simulated_gpu {

using optimizers::ValueType;

inline float value_at(const void* data, ValueType type, int64_t i) {
  switch (type) {
    case ValueType::kBFloat16:
      return BFloat16Bits::decode(static_cast<const uint16_t*>(data)[i]);
    case ValueType::kFloat16:
      return Float16Bits::decode(static_cast<const uint16_t*>(data)[i]);
    case ValueType::kFloat32:
      break;
  }
  return static_cast<const float*>(data)[i];
}

inline void put_value(void* data, ValueType type, int64_t i, float value) {
  switch (type) {
    case ValueType::kBFloat16:
      static_cast<uint16_t*>(data)[i] = BFloat16Bits::encode(value);
      return;
    case ValueType::kFloat16:
      static_cast<uint16_t*>(data)[i] = Float16Bits::encode(value);
      return;
    case ValueType::kFloat32:
      static_cast<float*>(data)[i] = value;
      return;
  }
}

inline Access update_access(const void* data, int64_t bytes, bool write) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  return {begin, begin + static_cast<size_t>(bytes), write};
}

inline int64_t bytes_of_value(ValueType type) { return type == ValueType::kFloat32 ? 4 : 2; }

// lamb_kernels.cc
const char* give_lamb_advance(const optimizers::LambRun* runs, int64_t count, const optimizers::UpdateScale& scale,
                              const optimizers::LambSums& sums, void* stream);
const char* give_lamb_apply(const optimizers::LambRun* runs, int64_t count, const optimizers::UpdateScale& scale,
                            const optimizers::LambSums& sums, void* stream);

}  // namespace ds::simulated_gpu
