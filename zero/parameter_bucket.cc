#include "zero/parameter_bucket.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/memory/storage_memory.h"
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

// Points the parameters that lie in `from` to `to`.
void move_parameters(const std::vector<Parameter>& parameters, const at::Storage& from, const at::Storage& to) {
  for (const Parameter& parameter : parameters) {
    at::TensorImpl* const tensor = parameter.tensor.unsafeGetTensorImpl();
    if (is_same_storage(tensor->unsafe_storage(), from)) tensor->set_storage_keep_dtype(to);
  }
}

}  // namespace

BucketStorage::BucketStorage(const BucketLayout& layout, const std::vector<Parameter>& parameters, at::Tensor flat)
    : flat_(std::move(flat)), released_text_(kReleased) {
  const at::NoGradGuard no_grad;
  for (const Segment& segment : layout.segments) {
    parameters_.push_back(parameters[static_cast<size_t>(segment.parameter)]);
    if (!flat_.defined()) continue;
    const at::Tensor& parameter = parameters_.back().tensor;
    parameter.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(true);  // made by detach(), say
    views_.push_back(view_of(flat_, segment, parameter));
    point_to(parameter, views_.back());
  }
}

void BucketStorage::begin_released() {
  take_storage(flat_);
  released_ = unreadable_storage(flat_.device(), flat_.nbytes(), named(released_text_, parameters_));
  move_parameters(parameters_, flat_.storage(), released_);
}

void BucketStorage::allocate(GatherMemory& memory) {
  ensure(released_ && !allocated(), "only a released bucket takes memory");
  give_storage(flat_, memory.take(flat_.nbytes(), flat_.device()), flat_.nbytes());
  if (std::exchange(hidden_, false)) set_unreadable_text(released_, named(released_text_, parameters_));
  move_parameters(parameters_, released_, flat_.storage());
}

void BucketStorage::release(GatherMemory& memory) {
  ensure(released_ && allocated(), "only a sharded bucket that is whole gives its memory back");
  move_parameters(parameters_, flat_.storage(), released_);
  memory.give_back(take_storage(flat_), flat_.nbytes());
}

void BucketStorage::begin_arrival() { move_parameters(parameters_, flat_.storage(), coming_storage()); }

void BucketStorage::end_arrival() { move_parameters(parameters_, coming_storage(), flat_.storage()); }

const at::Storage& BucketStorage::coming_storage() {
  if (!coming_) coming_ = unreadable_storage(flat_.device(), flat_.nbytes(), named(kComing, parameters_));
  return coming_;
}

void BucketStorage::show(const at::Tensor& tensor) const {
  at::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  const at::Storage& storage = impl->unsafe_storage();
  const bool waits = released_ ? !hidden_ && is_same_storage(storage, released_) : is_same_storage(storage, coming_);
  if (waits) impl->set_storage_keep_dtype(flat_.storage());
}

void BucketStorage::tell_when_released(std::string text) {
  released_text_ = std::move(text);
  if (released_) set_unreadable_text(released_, named(released_text_, parameters_));
}

void BucketStorage::hide(const std::string& text) {
  hidden_ = true;
  set_unreadable_text(released_, text);
  move_parameters(parameters_, flat_.storage(), released_);
}

void BucketStorage::end(const std::string& text) {
  hide(text);
  take_storage(flat_);
  flat_.storage().unsafeGetStorageImpl()->set_nbytes(flat_.nbytes());
  set_unreadable_text(flat_.storage(), text);
}

bool BucketStorage::is_here(size_t position) const {
  const at::TensorImpl& tensor = *parameters_[position].tensor.unsafeGetTensorImpl();
  const at::Storage& storage = tensor.unsafe_storage();
  return (is_same_storage(storage, flat_.storage()) || (released_ && is_same_storage(storage, released_)) ||
          (coming_ && is_same_storage(storage, coming_))) &&
         tensor.storage_offset() == views_[position].storage_offset() && tensor.dtype() == flat_.dtype();
}

at::Tensor BucketStorage::value_of(size_t position) const {
  const Parameter& parameter = parameters_[position];
  require(parameter.tensor.sizes() == views_[position].sizes(), "parameter ", parameter.name, ": expected the shape ",
          views_[position].sizes(), " that it had when the engine was made, found ", ds::describe(parameter.tensor));
  return parameter.tensor.detach();
}

void BucketStorage::take_back(size_t position, const at::Tensor& values) const {
  const at::NoGradGuard no_grad;
  if (!released_ || allocated()) views_[position].copy_(values);
  point_back(position);
}

void BucketStorage::point_back(size_t position) const {
  const at::Tensor& tensor = parameters_[position].tensor;
  tensor.set_data(views_[position]);
  if (released_ && !allocated()) tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(released_);
}

void BucketStorage::take_values_back() const {
  ensure(!released_ || allocated(), "values are taken back into memory");
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!is_here(i)) take_back(i, value_of(i));
  }
}

const Parameter* BucketStorage::take_parameters_back() const {
  const Parameter* found = nullptr;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (is_here(i)) continue;
    found = &parameters_[i];
    point_back(i);
  }
  return found;
}

ParameterBucket::ParameterBucket(BucketLayout layout, const std::vector<Parameter>& parameters,
                                 const at::Tensor& values, at::ScalarType dtype)
    : layout_(std::move(layout)), storage_(layout_, parameters, values.to(dtype)) {}

ParameterBucket::ParameterBucket(BucketLayout layout, const std::vector<Parameter>& parameters)
    : layout_(std::move(layout)), storage_(layout_, parameters, at::Tensor()) {}

ParameterBucket::ParameterBucket(BucketLayout layout, const std::vector<Parameter>& parameters, at::Tensor slice)
    : layout_(std::move(layout)),
      storage_(layout_, parameters, tensor_without_memory(layout_.numel, slice.options())),
      slice_(std::move(slice)) {
  const at::NoGradGuard no_grad;
  storage_.begin_released();
}

std::string ParameterBucket::describe(size_t index) const {
  const size_t more = parameters().size() - 1;
  return cat(index, " (", parameters().front().name, more > 0 ? cat(", ", more, " more)") : ")");
}

at::Tensor ParameterBucket::part(int rank) const {
  return flat().narrow(0, rank * layout_.slice_numel, layout_.slice_numel);
}

void ParameterBucket::shard(int rank, int bits, const std::shared_ptr<SliceStore>& store) {
  ensure(!sharded(), "a bucket is sharded once");
  const at::NoGradGuard no_grad;
  slice_ = KeptSlice(part(rank), bits, store);
  storage_.begin_released();
}

at::Tensor ParameterBucket::slice(int rank) const {
  ensure(slice_.bits() == 0, "an encoded slice has no elements to show");
  return sharded() ? slice_.tensor() : part(rank);
}

void ParameterBucket::keep_changes(int rank) {
  const at::NoGradGuard no_grad;
  ensure(sharded() && storage_.allocated(), "only a sharded bucket that is whole keeps changes");
  slice_.write(part(rank));
}

// Slices need no memory for the full bucket: each rank takes its part.
at::Tensor ParameterBucket::take_value_back(size_t position, int rank) {
  const at::NoGradGuard no_grad;
  const at::Tensor values = storage_.value_of(position);
  if (sharded()) {
    const at::Tensor flat_values = values.reshape({-1}).to(flat().scalar_type());
    const Segment& segment = layout_.segments[position];
    const int64_t first = rank * layout_.slice_numel;
    const int64_t from = std::max(first, segment.slice_offset);
    const int64_t to = std::min(first + layout_.slice_numel, segment.slice_offset + segment.length);
    if (from < to) {
      slice_.use(/*changes=*/true, [&] {
        slice_.tensor()
            .narrow(0, from - first, to - from)
            .copy_(flat_values.narrow(0, from - segment.slice_offset, to - from));
      });
    }
    drop_secondary();
  }
  storage_.take_back(position, values);
  return values;
}

void ParameterBucket::keep_secondary(int rank, int ranks) {
  const at::NoGradGuard no_grad;
  ensure(sharded() && storage_.allocated() && layout_.numel % ranks == 0,
         "a secondary slice is an even part of a whole bucket");
  secondary_ = flat().narrow(0, layout_.numel / ranks * rank, layout_.numel / ranks).clone();
}

}  // namespace ds::zero
