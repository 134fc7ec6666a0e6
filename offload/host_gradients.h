// Reduced gradients on the host: one slice per bucket, filled while backward runs (ZeRO-Offload, Ren et al. 2021).
//
// The first gradient of a bucket since clear() is copied over its slice, later ones are added. From a device, a
// gradient is first copied on the device, because the reducer reuses its memory at once; that copy travels beside the
// compute. An addition travels to a staging tensor and is done by the host at the next use of that staging or of the
// slice: backward waits only when all stagings are on their way. Additions keep their order.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "core/device/transfer_stream.h"
#include "core/slices/reduced_gradients.h"

namespace ds::offload {

// The slices and what is on its way to them. One caller at a time, from any thread. Takes device memory for one slice
// per staging.
class HostGradients final : public ReducedGradients {
 public:
  // slices: on the host, flat, one per bucket, in the gradients' dtype; undefined: this bucket is not offloaded.
  // stagings: on the host, flat, of the same dtype, each as long as the longest slice; two let a gradient travel while
  // another is added. At least one unless `device` is the CPU, where without any gradients are added in place.
  // Both lists are best parts of a PinnedArena, and are kept alive.
  HostGradients(std::vector<at::Tensor> slices, at::Device device, std::vector<at::Tensor> stagings);

  bool takes(size_t bucket) const override { return buckets_.at(bucket).slice.defined(); }
  // Adds a gradient, which is as long as the bucket's slice.
  void add(size_t bucket, const at::Tensor& own) override;
  // The mark at which all gradients of the bucket so far have arrived on the host.
  TransferStream::Mark arrival(size_t bucket) const;
  // The slice itself.
  at::Tensor gradient(size_t bucket) override;
  void clear() override;
  // Waits for all that arrives, and goes on with `slices` in place of the present ones. Returns these: undefined where
  // nothing was added.
  std::vector<at::Tensor> exchange(std::vector<at::Tensor> slices);

 private:
  struct Bucket {
    at::Tensor slice;
    bool filled = false;
    TransferStream::Mark arrived;
  };
  // The tensors that one gradient on its way occupies.
  struct Lane {
    at::Tensor staging;
    at::Tensor device_copy;  // made at first use
    TransferStream::Mark arrived;
    std::optional<size_t> adds_to;  // a bucket that `staging` is still to be added to
  };

  Lane& free_lane();
  void finish_addition(Lane& lane);
  at::Tensor keep(Lane& lane, const at::Tensor& own);

  std::vector<Bucket> buckets_;
  at::Device device_;
  std::vector<Lane> lanes_;
  size_t oldest_ = 0;      // lanes are used in turn
  TransferStream stream_;  // last: its destructor waits for copies into the members above
};

}  // namespace ds::offload
