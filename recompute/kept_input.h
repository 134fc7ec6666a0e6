// How a region keeps one of its inputs between forward and backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/split/split_tensor.h"
#include "dsengine/activation_checkpoint.h"
#include "recompute/slot_pool.h"

namespace ds::recompute {

// The tensor itself, with the count of its changes; or a copy: on the host, or this rank's part of it. Of a split
// tensor (core/split/split_tensor.h), which has a part only, it is the part that is copied to the host.
class KeptInput {
 public:
  KeptInput(const at::Tensor& input, size_t position, const CheckpointOptions& options, SlotPool& pool);

  // A tensor without graph, of the same values, shape, strides and device. Collective over the tensor-parallel group
  // where the input was divided. Throws UsageError when the input was changed in place since.
  at::Tensor restore() const;
  bool requires_grad() const { return requires_grad_; }
  int64_t bytes() const;  // of memory on this rank

 private:
  at::Tensor gathered() const;

  const size_t position_;
  const bool requires_grad_;
  at::Tensor kept_;                            // undefined: so was the input
  std::optional<int64_t> version_;             // the tensor's own, where no copy is kept
  at::Device device_ = at::kCPU;               // where a copy came from
  std::optional<Placement> placement_;         // set: kept_ is a copy of a split input's part
  std::vector<int64_t> shown_sizes_;           // and these are the sizes of its whole
  std::vector<int64_t> sizes_;                 // of the memory that was copied
  std::vector<int64_t> strides_;               // and its strides
  std::shared_ptr<comm::Communicator> group_;  // set: kept_ is this rank's part
  std::shared_ptr<void> lease_;                // holds kept_'s place in the pool
  std::shared_ptr<HostCopies> copies_;         // set: kept_ is on the host
  TransferStream::Mark arrived_;               // when it has its values
};

// A tensor on the same memory, with the same count of changes, without graph.
at::Tensor alias_of(const at::Tensor& tensor);

}  // namespace ds::recompute
