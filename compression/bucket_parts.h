// The inputs that the reductions of this folder take, and how they cut a bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "dsengine/comm.h"

namespace ds::compression {

// Throws UsageError unless gradient is flat, contiguous and float32, bfloat16 or float16, output is it or 1 / ranks of
// it, and op kSum or kAvg.
void require_reduction(const char* what, const std::string& label, const at::Tensor& output, const at::Tensor& gradient,
                       comm::ReduceOp op, int ranks);
// Whether the reduction is an all-reduce.
inline bool takes_all(const at::Tensor& output, const at::Tensor& gradient) { return output.is_same(gradient); }
// The reduction of a rank without peers: its gradient is the result.
comm::Work keep_alone(const at::Tensor& output, const at::Tensor& gradient);
inline int divisor_of(comm::ReduceOp op, int ranks) { return op == comm::ReduceOp::kAvg ? ranks : 1; }

struct Part {
  int64_t begin = 0;
  int64_t length = 0;
};
// The bucket cut into equal parts; where `ranks` does not divide numel, the last ones are shorter, or empty.
std::vector<Part> parts_of(int64_t numel, int ranks);

}  // namespace ds::compression
