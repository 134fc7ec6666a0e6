// Reductions of gradients that send one bit an element (compression/compressed_all_reduce.h), for any optimizer: signs
// with error feedback on both sides (Seide et al., Interspeech 2014; Karimireddy et al., arXiv:1901.09847).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/bucket_reduction.h"
#include "compression/compressed_all_reduce.h"
#include "compression/error_memory.h"

namespace ds::compression {

struct SignBucket {
  int64_t numel = 0;               // 0 for a bucket that never comes
  std::vector<ScaleRange> ranges;  // its parameters
};

// Alone, a rank keeps its gradient. A reduce-scatter sends as much as an all-reduce. The exchange is over when start()
// returns. Inf or NaN in a parameter make all of it arrive as Inf or NaN, and are not remembered.
class SignReduction final : public comm::BucketReduction {
 public:
  // Without `feedback` nothing is remembered.
  SignReduction(std::shared_ptr<comm::Communicator> group, const std::vector<SignBucket>& buckets, at::Device device,
                bool feedback);

  void begin_pass(int64_t step, double scale) override;
  comm::Work start(size_t bucket, const at::Tensor& output, const at::Tensor& gradient, comm::ReduceOp op,
                   std::string label) override;
  // The errors of this rank, and "server.BUCKET": of the part of the mean that it compresses, without the loss scale.
  std::vector<std::pair<std::string, at::Tensor>> memory() const override;
  void forget() override;

 private:
  void exchange(size_t bucket, const at::Tensor& worker, const at::Tensor& result, const std::string& label) const;

  std::shared_ptr<comm::Communicator> group_;
  ErrorMemory errors_;
  std::vector<std::optional<CompressedAllReduce>> exchanges_;
  std::vector<at::Tensor> servers_;  // undefined without feedback
  double scale_ = 1.0;
};

}  // namespace ds::compression
