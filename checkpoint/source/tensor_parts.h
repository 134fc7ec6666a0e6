// Walking through a tensor of a checkpoint in parts that fit in memory.
#pragma once

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "dsengine/checkpoint.h"

namespace ds::checkpoint {

inline constexpr int64_t kPartBytes = 16 << 20;

// Calls action(part) with consecutive flat parts of the tensor, in its dtype. `part` is overwritten by the next one.
// Passes on IoError.
template <class Action>
void for_each_part(Source& source, const std::string& path, const Action& action) {
  const int64_t total = source.info(path).numel();
  const at::ScalarType dtype = source.info(path).dtype;
  const int64_t step = kPartBytes / static_cast<int64_t>(c10::elementSize(dtype));
  const at::Tensor memory = at::empty({std::min(total, step)}, dtype);
  for (int64_t offset = 0; offset < total; offset += step) {
    const at::Tensor part = memory.narrow(0, 0, std::min(step, total - offset));
    source.read(path, offset, part);
    action(part);
  }
}

}  // namespace ds::checkpoint
