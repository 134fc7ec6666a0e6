// Reduce-scatters of gradients by a QuantizedReducer (qgZ of ZeRO++, Wang et al., arXiv:2306.10209).
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "comm/bucket_reduction.h"
#include "comm/quantized_collectives.h"

namespace ds::comm {

// Remembers nothing. Throws UsageError for an all-reduce, but with one rank.
class QuantizedBucketReduction final : public BucketReduction {
 public:
  explicit QuantizedBucketReduction(std::shared_ptr<const QuantizedReducer> reducer) : reducer_(std::move(reducer)) {}

  Work start(size_t /*bucket*/, const at::Tensor& output, const at::Tensor& gradient, ReduceOp op,
             std::string label) override {
    return reducer_->reduce_scatter(output, gradient, op, std::move(label));
  }

 private:
  std::shared_ptr<const QuantizedReducer> reducer_;
};

}  // namespace ds::comm
