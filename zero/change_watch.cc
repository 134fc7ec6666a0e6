#include "zero/change_watch.h"

#include <algorithm>

#include "core/check.h"

namespace ds::zero {
namespace {

std::exception_ptr lost_change(const std::string& name) {
  return std::make_exception_ptr(
      UsageError(cat("parameter ", name, " was changed in place while it was gathered for an operator; ",
                     "at stage 3 the change is lost. Change parameters in a scope of ",
                     "engine->gathered_parameters(..., modifier_rank)")));
}

}  // namespace

bool is_part_of(const at::Tensor& tensor, const Parameter& parameter) {
  if (!tensor.is_alias_of(parameter.tensor)) return false;
  const int64_t offset = tensor.storage_offset() - parameter.tensor.storage_offset();
  return offset >= 0 && offset < parameter.tensor.numel();
}

void ChangeWatch::begin(const ParameterBucket& bucket) {
  refused_ = false;
  versions_.clear();
  for (const Parameter& parameter : bucket.parameters()) versions_.push_back(parameter.tensor._version());
}

std::exception_ptr ChangeWatch::refuse(const ParameterBucket& bucket, const std::string& label,
                                       const at::Tensor& tensor) {
  refused_ = true;
  const std::vector<Parameter>& parameters = bucket.parameters();
  const auto changed = std::find_if(parameters.begin(), parameters.end(),
                                    [&](const Parameter& parameter) { return is_part_of(tensor, parameter); });
  return lost_change(changed == parameters.end() ? "of bucket " + label : changed->name);
}

std::exception_ptr ChangeWatch::find_change(const ParameterBucket& bucket) const {
  if (refused_) return nullptr;
  for (size_t i = 0; i < versions_.size(); ++i) {
    const Parameter& parameter = bucket.parameters()[i];
    if (parameter.tensor._version() != versions_[i]) return lost_change(parameter.name);
  }
  return nullptr;
}

}  // namespace ds::zero
