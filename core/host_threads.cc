#include "core/host_threads.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>

namespace ds {
namespace {

// How often a thread comes back for more, when all are equally fast.
constexpr int64_t kTurns = 8;

}  // namespace

// The library is compiled without OpenMP, where at::parallel_for runs on one thread; TensorIterator, inside LibTorch,
// does not. It iterates over one element for each thread, which then takes ranges until none is left: a thread whose
// core is wanted elsewhere (the one that launches kernels, one that waits for a device by spinning) takes fewer, where
// equal parts would let all the others wait for it.
void for_each_range(int64_t count, int64_t unit, int64_t grain,
                    const std::function<void(int64_t begin, int64_t end)>& body) {
  if (count == 0) return;
  const int64_t threads = std::clamp<int64_t>(count / std::max(grain, unit), 1, at::get_num_threads());
  if (threads == 1) return body(0, count);
  const int64_t turn = std::max(grain, count / (threads * kTurns));
  const int64_t length = (turn + unit - 1) / unit * unit;
  std::atomic<int64_t> next = 0;
  const auto take = [&] {
    for (;;) {
      const int64_t begin = next.fetch_add(length, std::memory_order_relaxed);
      if (begin >= count) return;
      body(begin, std::min(count, begin + length));
    }
  };
  const at::Tensor one_each = at::empty({threads}, at::kByte);
  auto iterator = at::TensorIteratorConfig().set_check_mem_overlap(false).add_const_input(one_each).build();
  iterator.for_each([&](char** /*data*/, const int64_t* /*strides*/, int64_t /*columns*/, int64_t /*rows*/) { take(); },
                    /*grain_size=*/1);
}

}  // namespace ds
