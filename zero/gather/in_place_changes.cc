#include "zero/gather/in_place_changes.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <exception>

#include "core/check.h"
#include "core/check_time.h"
#include "core/memory/storage_memory.h"
#include "zero/value_digest.h"

namespace ds::zero {

void ChangeWatch::begin(const ParameterBucket& bucket) {
  const CheckTime::Scope time;
  noted_ = false;
  versions_.clear();
  for (const Parameter& parameter : bucket.parameters()) versions_.push_back(parameter.tensor._version());
}

size_t ChangeWatch::changed_version(const ParameterBucket& bucket) const {
  const CheckTime::Scope time;
  size_t i = 0;
  while (i < versions_.size() && bucket.parameters()[i].tensor._version() == versions_[i]) ++i;
  return i;
}

std::string ChangeWatch::name(const ParameterBucket& bucket) const {
  const size_t changed = changed_version(bucket);
  return bucket.parameters()[changed < versions_.size() ? changed : 0].name;
}

void InPlaceChanges::take_over(size_t index, ParameterBucket& bucket, const ChangeWatch& watch, bool exact) {
  const std::string name = watch.name(bucket);
  if (errors_.failed()) return;  // its values are not worth keeping
  if (!exact) {
    errors_.keep(std::make_exception_ptr(UsageError(cat(
        "parameter ", name, " was changed in place while it was gathered for an operator with the loss ",
        "of zero_quantized_weights or of torch_autocast.lower_precision_safe_modules, which its ",
        "slices must not take over. Change it in a scope of engine->gathered_parameters(..., ", "modifier_rank)"))));
    return;
  }
  const at::RecordFunctionGuard not_intercepted(/*is_enabled=*/false);
  uint64_t digest = 0;
  for (const Parameter& parameter : bucket.parameters()) digest = digest * 31 + digest_of(parameter.tensor);
  // One of each bucket: nobody takes them while a program only evaluates.
  const auto noted = std::find_if(changed_.begin(), changed_.end(),
                                  [&](const ChangedBucket& changed) { return changed.bucket == index; });
  if (noted == changed_.end()) {
    changed_.push_back({.bucket = index, .parameter = name, .digest = digest});
  } else {
    *noted = {.bucket = index, .parameter = name, .digest = noted->digest * 31 + digest};
  }
  if (before_) before_();
  bucket.keep_changes(rank_);
  bucket.drop_secondary();
}

bool is_part_of(const at::Tensor& tensor, const Parameter& parameter) {
  if (!is_same_storage(tensor.storage(), parameter.tensor.storage())) return false;
  const int64_t offset = tensor.storage_offset() - parameter.tensor.storage_offset();
  return offset >= 0 && offset < parameter.tensor.numel();
}

}  // namespace ds::zero
