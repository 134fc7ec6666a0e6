// Reductions that begin to compress after some steps, when gradients are smaller and change less.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/bucket_reduction.h"

namespace ds::compression {

class DenseFirst final : public comm::BucketReduction {
 public:
  // Until `start_step` optimizer steps are done, gradients go over `group` as they are; then through `compressed`.
  DenseFirst(std::shared_ptr<comm::Communicator> group, std::unique_ptr<comm::BucketReduction> compressed,
             int64_t start_step)
      : group_(std::move(group)), compressed_(std::move(compressed)), start_step_(start_step) {}

  void begin_pass(int64_t step, double scale) override {
    step_ = step;
    compressed_->begin_pass(step, scale);
  }
  comm::Work start(size_t bucket, const at::Tensor& output, const at::Tensor& gradient, comm::ReduceOp op,
                   std::string label) override;
  std::vector<std::pair<std::string, at::Tensor>> memory() const override { return compressed_->memory(); }
  void forget() override { compressed_->forget(); }

 private:
  std::shared_ptr<comm::Communicator> group_;
  std::unique_ptr<comm::BucketReduction> compressed_;
  int64_t start_step_;
  int64_t step_ = 0;
};

}  // namespace ds::compression
