#include "recompute/kept_input.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "core/check.h"
#include "core/tensor_check.h"
#include "recompute/outside_tensors.h"

namespace ds::recompute {
namespace {

// Of a split input each rank has a part anyway.
bool divides(const at::Tensor& input, const CheckpointOptions& options) {
  return options.partition_activations && options.tensor_parallel_group && options.tensor_parallel_group->size() > 1 &&
         !is_split(input) && input.is_floating_point() && input.numel() >= options.tensor_parallel_group->size();
}

// A split parameter has its memory all the same.
bool goes_to_host(const at::Tensor& input, const CheckpointOptions& options) {
  return options.cpu_checkpointing && input.is_floating_point() && split_name(input).empty() &&
         at::accelerator::isAccelerator(input.device().type());
}

// All elements in the order of memory, as one dimension.
at::Tensor flat_view(const at::Tensor& dense) { return dense.as_strided({dense.numel()}, {1}, dense.storage_offset()); }

}  // namespace

at::Tensor alias_of(const at::Tensor& tensor) {
  if (tensor.is_inference()) return tensor;
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      torch::autograd::impl::version_counter(tensor), /*allow_tensor_metadata_change=*/true));
}

KeptInput::KeptInput(const at::Tensor& input, size_t position, const CheckpointOptions& options, SlotPool& pool)
    : position_(position), requires_grad_(input.defined() && input.requires_grad()) {
  if (!input.defined()) return;
  const bool part = divides(input, options);
  const bool host = goes_to_host(input, options);
  if (!part && !host) {
    kept_ = alias_of(input);
    version_ = version_of(input);
    return;
  }
  const at::NoGradGuard no_graph;
  if (is_split(input)) {
    placement_ = placement_of(input);
    shown_sizes_ = input.sizes().vec();
  }
  const at::Tensor memory = placement_ ? part_of(input) : input;
  const at::Tensor dense = memory.is_non_overlapping_and_dense() ? memory.detach() : memory.detach().contiguous();
  const at::Tensor flat = flat_view(dense);
  device_ = input.device();
  sizes_ = dense.sizes().vec();
  strides_ = dense.strides().vec();
  int64_t numel = flat.numel();
  int64_t begin = 0;
  if (part) {
    group_ = options.tensor_parallel_group;
    numel = (numel + group_->size() - 1) / group_->size();
    begin = std::min(numel * group_->rank(), flat.numel());
  }
  at::TensorOptions target = dense.options().requires_grad(false);
  if (host) target = target.device(at::kCPU).pinned_memory(true);
  if (options.contiguous_memory_optimization) {
    require(options.number_checkpoints.has_value(), "checkpoint: contiguous_memory_optimization: expected ",
            "number_checkpoints beside it, the number of regions of one forward pass, found none");
    SlotPool::Slot slot = pool.take(position, numel, target, *options.number_checkpoints);
    kept_ = slot.memory;
    lease_ = std::move(slot.lease);
  } else {
    kept_ = at::empty({numel}, target);
  }
  const int64_t own = std::min(numel, flat.numel() - begin);
  if (host) {
    copies_ = pool.copies_on(device_);
    arrived_ = copies_->keep(kept_.narrow(0, 0, own), flat.narrow(0, begin, own));
  } else {
    kept_.narrow(0, 0, own).copy_(flat.narrow(0, begin, own));
  }
  if (own < numel) kept_.narrow(0, own, numel - own).zero_();
}

at::Tensor KeptInput::restore() const {
  if (!kept_.defined()) return {};
  if (!version_) return gathered();
  require(version_of(kept_) == *version_, "checkpoint: input ", position_, " (", describe(kept_),
          ") was changed in place after the region ran: expected version ", *version_, ", found ", version_of(kept_),
          "; give the region a clone of it, or change a clone");
  return alias_of(kept_);
}

at::Tensor KeptInput::gathered() const {
  at::Tensor flat;
  if (group_) {
    const int64_t numel = kept_.numel();
    flat = at::empty({numel * group_->size()}, kept_.options().device(device_).pinned_memory(false));
    const at::Tensor own = flat.narrow(0, numel * group_->rank(), numel);
    if (copies_) copies_->wait_for(arrived_);
    own.copy_(kept_, /*non_blocking=*/true);
    group_->all_gather(flat, own, cat("activation checkpoint, input ", position_)).wait();
  } else {
    flat = copies_->bring(kept_);
  }
  const at::Tensor dense = alias_of(flat.as_strided(sizes_, strides_, 0));
  return placement_ ? make_split(dense, *placement_, shown_sizes_) : dense;
}

int64_t KeptInput::bytes() const {
  if (!kept_.defined()) return 0;
  const at::NoGradGuard no_graph;
  return static_cast<int64_t>((is_split(kept_) ? part_of(kept_) : kept_).nbytes());
}

}  // namespace ds::recompute
