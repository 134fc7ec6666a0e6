#include "zero/parameter_bucket.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/memory/storage_memory.h"
#include "core/numbers/block_codec.h"
#include "core/tensor_check.h"

namespace ds::zero {
namespace {

constexpr const char* kReleased =
    "parameter {} is not in memory: at stage 3 a rank has its slice alone, and the whole while an operator of the "
    "engine's thread reads it. torch::save(), data_ptr(), accessors and other threads see it whole in a scope of "
    "engine->gathered_parameters(model->parameters()); whole models are also written by engine->save_16bit_model() and "
    "save_checkpoint()";

constexpr const char* kComing =
    "parameter {} is on its way from the ranks that have updated it since step(): operators of the engine's thread "
    "wait "
    "for it by themselves; for torch::save(), data_ptr(), accessors and other threads call "
    "engine->synchronize_parameters() first";

// `text` with the name of what it is about.
std::string named(std::string text, const std::vector<Parameter>& parameters) {
  const size_t more = parameters.size() - 1;
  return text.replace(text.find("{}"), 2,
                      cat(parameters.front().name, more > 0 ? cat(" (or one of ", more, " beside it)") : ""));
}

}  // namespace

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
    : layout_(std::move(layout)), flat_(values.to(dtype)), released_text_(kReleased) {
  const at::NoGradGuard no_grad;
  for (const Segment& segment : layout_.segments) {
    parameters_.push_back(parameters[static_cast<size_t>(segment.parameter)]);
    const at::Tensor& parameter = parameters_.back().tensor;
    parameter.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(true);  // made by detach(), say
    views_.push_back(view_of(flat_, segment, parameter));
    point_to(parameter, views_.back());
  }
}

ParameterBucket::ParameterBucket(BucketLayout layout, const std::vector<Parameter>& parameters)
    : layout_(std::move(layout)) {
  for (const Segment& segment : layout_.segments) {
    parameters_.push_back(parameters[static_cast<size_t>(segment.parameter)]);
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
  released_ = unreadable_storage(flat_.device(), flat_.nbytes(), named(released_text_, parameters_));
  move_parameters(flat_.storage(), released_);
}

void ParameterBucket::move_parameters(const at::Storage& from, const at::Storage& to) const {
  for (const Parameter& parameter : parameters_) {
    at::TensorImpl* const tensor = parameter.tensor.unsafeGetTensorImpl();
    if (is_same_storage(tensor->unsafe_storage(), from)) tensor->set_storage_keep_dtype(to);
  }
}

void ParameterBucket::show(const at::Tensor& tensor) const {
  at::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  const at::Storage& storage = impl->unsafe_storage();
  const bool waits = sharded() ? !hidden_ && is_same_storage(storage, released_) : is_same_storage(storage, coming_);
  if (waits) impl->set_storage_keep_dtype(flat_.storage());
}

void ParameterBucket::begin_arrival() { move_parameters(flat_.storage(), coming_storage()); }

void ParameterBucket::end_arrival() { move_parameters(coming_storage(), flat_.storage()); }

const at::Storage& ParameterBucket::coming_storage() {
  if (!coming_) coming_ = unreadable_storage(flat_.device(), flat_.nbytes(), named(kComing, parameters_));
  return coming_;
}

void ParameterBucket::tell_when_released(std::string text) {
  released_text_ = std::move(text);
  if (sharded()) set_unreadable_text(released_, named(released_text_, parameters_));
}

void ParameterBucket::hide(const std::string& text) {
  hidden_ = true;
  set_unreadable_text(released_, text);
  move_parameters(flat_.storage(), released_);
}

void ParameterBucket::end(const std::string& text) {
  hide(text);
  take_storage(flat_);
  flat_.storage().unsafeGetStorageImpl()->set_nbytes(flat_.nbytes());
  set_unreadable_text(flat_.storage(), text);
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
  if (std::exchange(hidden_, false)) set_unreadable_text(released_, named(released_text_, parameters_));
  move_parameters(released_, flat_.storage());
}

void ParameterBucket::release(GatherMemory& memory) {
  ensure(sharded() && allocated(), "only a sharded bucket that is whole gives its memory back");
  move_parameters(flat_.storage(), released_);
  memory.give_back(take_storage(flat_), flat_.nbytes());
}

bool ParameterBucket::is_here(size_t position) const {
  const at::TensorImpl& tensor = *parameters_[position].tensor.unsafeGetTensorImpl();
  const at::Storage& storage = tensor.unsafe_storage();
  return (is_same_storage(storage, flat_.storage()) || (released_ && is_same_storage(storage, released_)) ||
          (coming_ && is_same_storage(storage, coming_))) &&
         tensor.storage_offset() == layout_.segments[position].slice_offset && tensor.dtype() == flat_.dtype();
}

void ParameterBucket::take_values_back() const {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (is_here(i)) continue;
    require_shape(i);
    views_[i].copy_(parameters_[i].tensor.detach());
    point_back(i);
  }
}

void ParameterBucket::require_shape(size_t position) const {
  const Parameter& parameter = parameters_[position];
  require(parameter.tensor.sizes() == views_[position].sizes(), "parameter ", parameter.name, ": expected the shape ",
          views_[position].sizes(), " that it had when the engine was made, found ", ds::describe(parameter.tensor));
}

void ParameterBucket::point_back(size_t position) const {
  const at::Tensor& tensor = parameters_[position].tensor;
  tensor.set_data(views_[position]);
  if (sharded() && !allocated()) tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(released_);
}

// Slices need no memory for the full bucket: each rank takes its part.
at::Tensor ParameterBucket::take_value_back(size_t position, int rank) {
  const at::NoGradGuard no_grad;
  require_shape(position);
  const at::Tensor values = parameters_[position].tensor.detach();
  const at::Tensor flat_values = values.reshape({-1}).to(flat_.scalar_type());
  const Segment& segment = layout_.segments[position];
  if (sharded()) {
    const int64_t first = rank * layout_.slice_numel;
    const int64_t from = std::max(first, segment.slice_offset);
    const int64_t to = std::min(first + layout_.slice_numel, segment.slice_offset + segment.length);
    if (from < to) {
      use_slice(/*changes=*/true, [&] {
        own_.narrow(0, from - first, to - from).copy_(flat_values.narrow(0, from - segment.slice_offset, to - from));
      });
    }
    drop_secondary();
  }
  if (!sharded() || allocated()) views_[position].copy_(values);
  point_back(position);
  return values;
}

const Parameter* ParameterBucket::take_parameters_back() const {
  const at::NoGradGuard no_grad;
  const Parameter* found = nullptr;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (is_here(i)) continue;
    found = &parameters_[i];
    point_back(i);
  }
  return found;
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
