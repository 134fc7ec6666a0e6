// The interface of reductions that replace the all-reduce or reduce-scatter of a bucket of gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/comm.h"

namespace ds::comm {

// Collective: all ranks make the same calls in the same order, and wait for their Works in the same order, which may
// begin further exchanges. Used from one thread at a time. Works must not outlive it.
class BucketReduction {
 public:
  virtual ~BucketReduction() = default;

  // Whether it reduces this bucket; others are sent as they are. The answer is the same on all ranks, and at all times.
  virtual bool takes(size_t /*bucket*/) const { return true; }
  // To be called before the first start() of a backward pass. `step`: optimizer steps that are done. `scale`: the loss
  // scale, which the gradients contain.
  virtual void begin_pass(int64_t /*step*/, double /*scale*/) {}
  // Begins a reduction. gradient: [n], flat, contiguous, float32, bfloat16 or float16, what this rank has of the
  // bucket. output: the same tensor (all-reduce), or the rank's own part of it, [n / W] (reduce-scatter). When wait()
  // of the Work has returned, output is the kSum or kAvg over the ranks, as far as the implementation carries it; the
  // rest of gradient is unspecified.
  virtual Work start(size_t bucket, const at::Tensor& output, const at::Tensor& gradient, ReduceOp op,
                     std::string label) = 0;

  // Tensors that this rank alone remembers from step to step (error feedback, warm starts), by name: live references,
  // the same names and shapes at all times. For checkpoints, between steps.
  virtual std::vector<std::pair<std::string, at::Tensor>> memory() const { return {}; }
  // Puts memory() back to what it was at the start.
  virtual void forget() {}
  int64_t memory_bytes() const {
    int64_t bytes = 0;
    for (const auto& [name, tensor] : memory()) bytes += static_cast<int64_t>(tensor.nbytes());
    return bytes;
  }
};

}  // namespace ds::comm
