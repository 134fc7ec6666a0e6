// Work on arrays in the host's memory, spread over LibTorch's threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace ds {

// body(begin, end) on ranges that cover [0, count), each a multiple of `unit` long but the last; one range on the
// calling thread when there are fewer than twice `grain` elements. A thread gets several ranges, one after the other,
// as it comes for them; how long they are depends on the number of threads, so a result that must not has to be one of
// elements, or of whole units.
void for_each_range(int64_t count, int64_t unit, int64_t grain,
                    const std::function<void(int64_t begin, int64_t end)>& body);

// The elements of `flat`: contiguous on the CPU.
inline void for_each_range(const at::Tensor& flat, int64_t unit, int64_t grain,
                           const std::function<void(int64_t begin, int64_t end)>& body) {
  for_each_range(flat.numel(), unit, grain, body);
}

}  // namespace ds
