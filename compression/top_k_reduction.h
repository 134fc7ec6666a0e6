// Reductions of gradients that send the elements of largest magnitude only, the rest later: top-k sparsification with
// error feedback (Aji & Heafield, arXiv:1704.05021; Deep Gradient Compression, Lin et al., arXiv:1712.01887, without
// its momentum correction).
//
//   all-reduce      the k largest of the bucket go to every rank (all-gather)
//   reduce-scatter  the k / W largest of each rank's part go to that rank (all-to-all)
//
// An element costs an int32 position and a value of the gradient's type, 8 or 6 bytes. What arrives is added in
// float32, in rank order: every rank gets the same bits. Of elements of equal magnitude the first ones are sent. Of one
// that has grown beyond the largest float16 that much is sent, and the rest later.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/bucket_reduction.h"
#include "compression/bucket_parts.h"
#include "compression/error_memory.h"

namespace ds::compression {

// Returns int64 [count]: the positions of the `count` elements of largest magnitude of `values`, flat and without NaN;
// of equal ones those that come first. 0 <= count <= numel, less than 2^31. Needs memory for one more tensor like
// `values`; on a device, where it does not wait, 20 bytes an element. Values on a device may be NaN: what is found then
// is some `count` elements.
at::Tensor largest_elements(const at::Tensor& values, int64_t count);

// Alone, a rank keeps its gradient. A gradient with Inf or NaN is sent as NaN in all the elements it sends. A bucket
// has less than 2^31 elements.
class TopKReduction final : public comm::BucketReduction {
 public:
  // `share`: of the elements that are sent, 0 < share <= 1; at least one. `group`: for exchanges that begin in start().
  TopKReduction(std::shared_ptr<comm::Communicator> group, ErrorMemory errors, double share);

  void begin_pass(int64_t step, double scale) override;
  comm::Work start(size_t bucket, const at::Tensor& output, const at::Tensor& gradient, comm::ReduceOp op,
                   std::string label) override;
  std::vector<std::pair<std::string, at::Tensor>> memory() const override { return errors_.memory(); }
  void forget() override { errors_.forget(); }

 private:
  // Whether the gradient is finite: what the host knows, or what only the device does (bool []).
  struct Verdict {
    bool finite = true;
    at::Tensor on_device = {};
  };

  int64_t count_of(int64_t numel) const;
  void pack(const Corrected& corrected, Part range, at::ScalarType dtype, const Verdict& verdict,
            const at::Tensor& message) const;

  std::shared_ptr<comm::Communicator> group_;
  ErrorMemory errors_;
  double share_;
};

}  // namespace ds::compression
