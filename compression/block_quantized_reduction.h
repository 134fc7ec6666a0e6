// Reductions of gradients that send integers with a scale per block (core/numbers/block_codec.h).
//
//   all ranks   x = gradient + error; part r of x, encoded, to rank r (all-to-all)
//   rank r      adds what it received in float32, in rank order: reduce-scatter ends here
//   all-reduce  the sum, encoded, to all ranks (all-gather): every rank gets the same bits, of its own part too
//
// 8 bits send 0.252 of the bytes of float32: an all-reduce 2.016 n (W-1)/W bytes for n elements. Both roundings go to
// the error: that of x to the rank that made it, that of the sum to the rank that added it. The sum over steps of what
// arrived is then that of the gradients but for what is remembered and the rounding of the output's type.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "comm/bucket_reduction.h"
#include "compression/error_memory.h"
#include "compression/exchange_groups.h"
#include "core/numbers/block_codec.h"

namespace ds::compression {

// Alone, a rank keeps its gradient. An element with Inf or NaN makes its block arrive as NaN. Memory of a start():
// encoded_bytes(n) twice, and float32 [n / W].
class BlockQuantizedReduction final : public comm::BucketReduction {
 public:
  // `bits`: 8 or 4.
  BlockQuantizedReduction(ExchangeGroups groups, ErrorMemory errors, int bits = 8);

  void begin_pass(int64_t step, double scale) override;
  // Throws UsageError on an output that is neither the gradient nor an even part of it.
  comm::Work start(size_t bucket, const at::Tensor& output, const at::Tensor& gradient, comm::ReduceOp op,
                   std::string label) override;
  std::vector<std::pair<std::string, at::Tensor>> memory() const override { return errors_.memory(); }
  void forget() override { errors_.forget(); }

 private:
  struct Exchange;

  comm::Work sum_to_all(Exchange& exchange, const std::string& label) const;

  ExchangeGroups groups_;
  ErrorMemory errors_;
  BlockCodec codec_;
};

}  // namespace ds::compression
