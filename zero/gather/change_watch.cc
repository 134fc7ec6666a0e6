#include "zero/gather/change_watch.h"

#include "core/check_time.h"
#include "core/memory/storage_memory.h"

namespace ds::zero {

bool is_part_of(const at::Tensor& tensor, const Parameter& parameter) {
  if (!is_same_storage(tensor.storage(), parameter.tensor.storage())) return false;
  const int64_t offset = tensor.storage_offset() - parameter.tensor.storage_offset();
  return offset >= 0 && offset < parameter.tensor.numel();
}

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

}  // namespace ds::zero
