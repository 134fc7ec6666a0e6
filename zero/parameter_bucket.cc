#include "zero/parameter_bucket.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "core/block_codec.h"
#include "core/check.h"
#include "core/storage_memory.h"

namespace ds::zero {

at::Tensor view_of(const at::Tensor& flat, const Segment& segment, const at::Tensor& like) {
  return flat.narrow(0, segment.slice_offset, segment.length).view(like.sizes());
}

void point_to(const at::Tensor& tensor, const at::Tensor& values) {
  if (!tensor.is_meta()) {
    tensor.set_data(values);
    return;
  }
  // set_data() does not leave the meta device.
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  impl->_change_backend_component_keys(values.device());
  impl->set_storage_and_dtype(values.storage(), values.dtype());
  impl->set_sizes_and_strides(values.sizes(), values.strides(), values.storage_offset());
}

void take_elements(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard not_intercepted(/*is_enabled=*/false);
  tensor.set_data(at::empty({0}, tensor.options().requires_grad(false)));
}

at::Tensor flatten(const BucketLayout& layout, const std::vector<Parameter>& parameters,
                   const at::TensorOptions& options, const std::function<at::Tensor(const Parameter&)>& value) {
  const at::NoGradGuard no_grad;
  at::Tensor flat = at::empty({layout.numel}, options);
  for (const auto& [offset, length] : padding_of(layout)) flat.narrow(0, offset, length).zero_();
  for (const Segment& segment : layout.segments) {
    const Parameter& parameter = parameters[static_cast<size_t>(segment.parameter)];
    const at::Tensor from = value(parameter);
    if (from.defined()) view_of(flat, segment, parameter.tensor).copy_(from);
  }
  return flat;
}

ParameterBucket::ParameterBucket(BucketLayout layout, const std::vector<Parameter>& parameters,
                                 const at::Tensor& values, at::ScalarType dtype)
    : layout_(std::move(layout)), flat_(values.to(dtype)) {
  const at::NoGradGuard no_grad;
  for (const Segment& segment : layout_.segments) {
    parameters_.push_back(parameters[static_cast<size_t>(segment.parameter)]);
    const at::Tensor& parameter = parameters_.back().tensor;
    point_to(parameter, view_of(flat_, segment, parameter));
  }
}

std::string ParameterBucket::describe(size_t index) const {
  const size_t more = parameters_.size() - 1;
  return cat(index, " (", parameters_.front().name, more > 0 ? cat(", ", more, " more)") : ")");
}

at::Tensor ParameterBucket::slice(int rank) const {
  ensure(bits_ == 0, "an encoded slice has no elements to show");
  return sharded() ? own_ : part(rank);
}

at::Tensor ParameterBucket::part(int rank) const {
  return flat_.narrow(0, rank * layout_.slice_numel, layout_.slice_numel);
}

void ParameterBucket::shard(int rank, int bits, std::shared_ptr<SliceStore> store) {
  ensure(!sharded(), "a bucket is sharded once");
  const at::NoGradGuard no_grad;
  bits_ = bits;
  in_store_ = store != nullptr;
  store_ = store ? std::move(store) : std::make_shared<SliceStore>(flat_.device());
  const at::Tensor values = bits == 0 ? part(rank) : encoded(part(rank));
  own_ = store_->allocate(values.numel(), values.scalar_type());
  own_.copy_(values);
  store_->unload(own_, /*changed=*/true);
  take_storage(flat_);
}

void ParameterBucket::use_slice(bool changes, const std::function<void()>& use) const {
  // Gathers that were given to the device may still have to copy the slice that is now to change on the host.
  const at::Device device = flat_.device();
  if (changes && own_.defined() && own_.device() != device)
    c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
  load_slice();
  try {
    use();
  } catch (...) {
    try {
      unload_slice(changes);
    } catch (const Error&) {  // the failure that led here is the one to report
    }
    throw;
  }
  unload_slice(changes);
}

void ParameterBucket::load_slice() const {
  if (store_) store_->load(own_);
}

void ParameterBucket::unload_slice(bool changed) const {
  if (store_) store_->unload(own_, changed);
}

void ParameterBucket::prefetch_slice() const {
  if (store_) store_->prefetch(own_);
}

at::Tensor ParameterBucket::encoded(const at::Tensor& values) const {
  const BlockCodec codec(bits_);
  at::Tensor bytes = at::empty({codec.encoded_bytes(values.numel())}, values.options().dtype(at::kByte));
  codec.encode(values, bytes);
  return bytes;
}

void ParameterBucket::allocate(GatherMemory& memory) {
  ensure(sharded() && !allocated(), "only a released bucket takes memory");
  give_storage(flat_, memory.take(flat_.nbytes(), flat_.device()), flat_.nbytes());
}

void ParameterBucket::release(GatherMemory& memory) {
  ensure(sharded() && allocated(), "only a sharded bucket that is whole gives its memory back");
  memory.give_back(take_storage(flat_), flat_.nbytes());
}

void ParameterBucket::keep_changes(int rank) {
  const at::NoGradGuard no_grad;
  ensure(sharded() && allocated(), "only a sharded bucket that is whole keeps changes");
  use_slice(/*changes=*/true, [&] { own_.copy_(bits_ == 0 ? part(rank) : encoded(part(rank))); });
}

void ParameterBucket::keep_secondary(int rank, int ranks) {
  const at::NoGradGuard no_grad;
  ensure(sharded() && allocated() && layout_.numel % ranks == 0, "a secondary slice is an even part of a whole bucket");
  secondary_ = flat_.narrow(0, layout_.numel / ranks * rank, layout_.numel / ranks).clone();
}

int64_t ParameterBucket::held_bytes() const {
  auto bytes = static_cast<int64_t>(flat_.storage().nbytes());
  if (sharded() && !in_store_) bytes += static_cast<int64_t>(own_.nbytes());
  return bytes;
}

}  // namespace ds::zero
