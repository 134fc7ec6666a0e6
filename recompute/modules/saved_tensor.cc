#include "recompute/modules/saved_tensor.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "core/check.h"
#include "core/tensor_check.h"
#include "recompute/kept_input.h"
#include "recompute/outside_tensors.h"

namespace ds::recompute {
namespace {

// What would stay in memory for the sake of a value alone, up to a limit; and the values on the way to it.
struct Needs {
  int64_t bytes = 0;
  std::vector<StoredValue*> values;
};

Needs needs_of(StoredValue& value, int64_t limit) {
  Needs result;
  std::unordered_set<const StoredValue*> seen = {&value};
  std::unordered_set<const Step*> steps;
  result.values.push_back(&value);
  for (size_t next = 0; next < result.values.size() && result.bytes < limit; ++next) {
    StoredValue& each = *result.values[next];
    if (each.anchored || each.blank) continue;
    if (!each.step) {
      result.bytes += each.bytes;
      continue;
    }
    if (!steps.insert(each.step.get()).second) continue;
    result.bytes += each.step->state_bytes;
    for (const Argument& argument : each.step->arguments) {
      for (const std::optional<TensorRef>& ref : argument.tensors) {
        if (ref && seen.insert(ref->value.get()).second) result.values.push_back(ref->value.get());
      }
    }
  }
  return result;
}

constexpr int64_t kSamples = 64;

}  // namespace

std::vector<uint8_t> samples_of(const at::Tensor& tensor) {
  std::vector<uint8_t> result;
  if (!tensor.is_cpu() || tensor.numel() == 0) return result;
  const auto* const memory = static_cast<const uint8_t*>(tensor.const_data_ptr());
  const int64_t size = tensor.element_size();
  const int64_t count = std::min(kSamples, tensor.numel());
  for (int64_t sample = 0; sample < count; ++sample) {
    int64_t index = sample * tensor.numel() / count;
    int64_t offset = 0;
    for (int64_t dim = tensor.dim(); dim-- > 0;) {
      offset += index % tensor.size(dim) * tensor.stride(dim);
      index /= tensor.size(dim);
    }
    result.insert(result.end(), memory + offset * size, memory + (offset + 1) * size);
  }
  return result;
}

SavedTensor::SavedTensor(const at::Tensor& tensor)
    : kept_(alias_of(tensor)), counts_(counts_of(tensor)), version_(version_of(tensor)) {
  if (!tensor.is_inference()) changes_ = tensor.unsafeGetTensorImpl()->version_counter();
}

SavedTensor::~SavedTensor() {
  if (!value_ || kept_.defined()) return;
  const std::lock_guard lock(*value_->mutex);
  --value_->savers;
  if (value_->savers == 0) value_->made = c10::Storage();
}

int64_t SavedTensor::decide(OperatorLog& log) {
  const Counts counts = *std::exchange(counts_, std::nullopt);
  if (!is_plain(kept_)) return 0;
  auto made = log.made_value_of(kept_);
  if (!made) {
    value_ = log.value_of(kept_, counts);
    value_->anchored = true;
    return 0;
  }
  const Needs needs = needs_of(*made, made->bytes);
  if (needs.bytes >= made->bytes) {
    log.hold(made, kept_, counts);
    value_ = std::move(made);
    value_->anchored = true;
    return 0;
  }
  for (StoredValue* const value : needs.values) value->anchored = true;
  samples_ = samples_of(kept_);
  geometry_.emplace(kept_);
  made_by_ = made->step->op.operator_name().name;
  value_ = std::move(made);
  {
    const std::lock_guard lock(*value_->mutex);
    ++value_->savers;
  }
  kept_.reset();
  return value_->bytes;
}

at::Tensor SavedTensor::unpack() const {
  const int64_t now = changes_.enabled() ? changes_.current_version() : version_;
  require(now == version_, "backward: one of the variables needed for gradient computation has been modified by an ",
          "inplace operation, in a module of apply_activation_checkpointing: expected version ", version_, ", found ",
          now, lazy([&] { return geometry_ ? cat(" of an output of ", made_by_) : cat(" of ", describe(kept_)); }),
          "; change a clone of it");
  if (kept_.defined()) return kept_;
  return made_again();
}

at::Tensor SavedTensor::made_again() const {
  const std::lock_guard lock(*value_->mutex);
  at::Tensor result = geometry_->on(storage_of(value_));
  require(samples_of(result) == samples_, "activation checkpointing of modules: ", made_by_,
          " computed again gave other values than in forward (", describe(result),
          "): code that is no operator has written to its memory, or what it read, by a pointer, or settings that ",
          "choose kernels (threads) have changed since; leave the module out of apply_activation_checkpointing, or ",
          "keep this operator (ModuleCheckpointOptions::keep)");
  return result;
}

}  // namespace ds::recompute
