#include "optim/host_threads.h"

#include <ATen/TensorIterator.h>

#include <algorithm>

namespace ds::optimizers {

// The library is compiled without OpenMP, where at::parallel_for runs on one thread; TensorIterator, inside LibTorch,
// does not. It iterates over the first element of each unit.
void for_each_range(const at::Tensor& flat, int64_t unit, int64_t grain,
                    const std::function<void(int64_t begin, int64_t end)>& body) {
  const int64_t numel = flat.numel();
  if (numel == 0) return;
  const int64_t units = (numel + unit - 1) / unit;
  const at::Tensor firsts = flat.detach().as_strided({units}, {unit});
  auto iterator = at::TensorIteratorConfig().set_check_mem_overlap(false).add_const_input(firsts).build();
  const auto* base = static_cast<const char*>(flat.const_data_ptr());
  const int64_t unit_bytes = unit * flat.element_size();
  iterator.for_each(
      [&](char** data, const int64_t* /*strides*/, int64_t columns, int64_t rows) {
        const int64_t first = (data[0] - base) / unit_bytes;
        body(first * unit, std::min(numel, (first + columns * rows) * unit));
      },
      std::max<int64_t>(1, grain / unit));
}

}  // namespace ds::optimizers
