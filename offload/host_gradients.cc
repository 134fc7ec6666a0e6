#include "offload/host_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace ds::offload {

HostGradients::HostGradients(std::vector<at::Tensor> slices, at::Device device, std::vector<at::Tensor> stagings)
    : device_(device), stream_(device) {
  int64_t longest = 0;
  for (at::Tensor& slice : slices) {
    ensure(!slice.defined() || (slice.is_cpu() && slice.dim() == 1), "slices of gradients on the host are flat");
    if (slice.defined()) longest = std::max(longest, slice.numel());
    buckets_.push_back({.slice = std::move(slice)});
  }
  ensure(device.is_cpu() || !stagings.empty() || longest == 0, "gradients of a device travel through a staging tensor");
  for (at::Tensor& staging : stagings) {
    ensure(staging.is_cpu() && staging.dim() == 1 && staging.numel() >= longest,
           "a staging tensor is on the host, flat and as long as the longest slice");
    lanes_.push_back({.staging = std::move(staging)});
  }
}

void HostGradients::add(size_t index, const at::Tensor& own) {
  Bucket& bucket = buckets_.at(index);
  ensure(bucket.slice.defined() && own.dim() == 1 && own.numel() == bucket.slice.numel(),
         "a gradient on the host is as long as its slice");
  const at::NoGradGuard no_grad;
  const bool first = !std::exchange(bucket.filled, true);
  if (lanes_.empty()) {
    first ? bucket.slice.copy_(own) : bucket.slice.add_(own);
    return;
  }
  Lane& lane = free_lane();
  const at::Tensor from = keep(lane, own);
  const at::Tensor to = first ? bucket.slice : lane.staging.narrow(0, 0, own.numel());
  lane.arrived = stream_.copy(to, from);
  if (first) {
    bucket.arrived = lane.arrived;
  } else {
    lane.adds_to = index;
  }
}

HostGradients::Lane& HostGradients::free_lane() {
  Lane& lane = lanes_[oldest_];
  oldest_ = (oldest_ + 1) % lanes_.size();
  finish_addition(lane);
  return lane;
}

// The slice itself arrived before: it travelled earlier on the same stream.
void HostGradients::finish_addition(Lane& lane) {
  if (!lane.adds_to) return;
  stream_.wait_on_host(lane.arrived);
  const at::Tensor& slice = buckets_[*lane.adds_to].slice;
  slice.add_(lane.staging.narrow(0, 0, slice.numel()));
  lane.adds_to.reset();
}

at::Tensor HostGradients::keep(Lane& lane, const at::Tensor& own) {
  if (device_.is_cpu()) return own;  // copied at once
  if (!lane.device_copy.defined() || lane.device_copy.scalar_type() != own.scalar_type())
    lane.device_copy = at::empty({lane.staging.numel()}, own.options());
  stream_.wait_on_device(lane.arrived);  // what it held may still be leaving
  at::Tensor copy = lane.device_copy.narrow(0, 0, own.numel());
  copy.copy_(own);
  return copy;
}

TransferStream::Mark HostGradients::arrival(size_t index) const {
  TransferStream::Mark latest = buckets_.at(index).arrived;
  for (size_t turn = 0; turn < lanes_.size(); ++turn) {
    const Lane& lane = lanes_[(oldest_ + turn) % lanes_.size()];
    if (lane.adds_to == index) latest = lane.arrived;  // copies arrive in the order in which they left
  }
  return latest;
}

at::Tensor HostGradients::gradient(size_t index) {
  Bucket& bucket = buckets_.at(index);
  if (!bucket.filled) return {};
  const at::NoGradGuard no_grad;
  for (size_t turn = 0; turn < lanes_.size(); ++turn) {
    Lane& lane = lanes_[(oldest_ + turn) % lanes_.size()];
    if (lane.adds_to == index) finish_addition(lane);
  }
  stream_.wait_on_host(bucket.arrived);
  return bucket.slice;
}

std::vector<at::Tensor> HostGradients::exchange(std::vector<at::Tensor> slices) {
  ensure(slices.size() == buckets_.size(), "slices are exchanged for as many");
  std::vector<at::Tensor> present;
  for (size_t index = 0; index < buckets_.size(); ++index) {
    present.push_back(gradient(index));
    buckets_[index].slice = std::move(slices[index]);
  }
  clear();
  return present;
}

void HostGradients::clear() {
  for (Bucket& bucket : buckets_) bucket.filled = false;
  for (Lane& lane : lanes_) lane.adds_to.reset();
}

}  // namespace ds::offload
