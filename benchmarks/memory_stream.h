// A stream with next to no arithmetic: how fast this machine's memory is right now.
#pragma once

#include <ATen/ops/rand.h>

#include <cstdint>

#include "core/host_threads.h"

// Loops compiled for several instruction sets, of which the loader takes one.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define DS_STREAM_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define DS_STREAM_CLONES
#endif

namespace ds::benchmarks {

DS_STREAM_CLONES static void triad(float* __restrict a, const float* __restrict b, const float* __restrict c,
                                   int64_t count) {
  for (int64_t i = 0; i < count; ++i) a[i] = b[i] + 3.0F * c[i];
}

// a = b + 3 c, over arrays of its own, on LibTorch's threads.
class Triad {
 public:
  static constexpr double kBytes = 12;  // of an element: two read, one written

  explicit Triad(int64_t numel) : a_(at::rand({numel})), b_(at::rand({numel})), c_(at::rand({numel})) {}

  void run() {
    ds::for_each_range(a_, 1024, 1 << 15, [&](int64_t begin, int64_t end) {
      triad(a_.data_ptr<float>() + begin, b_.data_ptr<float>() + begin, c_.data_ptr<float>() + begin, end - begin);
    });
  }

 private:
  at::Tensor a_, b_, c_;
};

}  // namespace ds::benchmarks
