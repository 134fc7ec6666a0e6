#include "optim/shard_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <set>
#include <utility>

#include "core/check.h"
#include "core/tensor_check.h"
#include "optim/chunked_update.h"
#include "optim/device_update.h"
#include "optim/row_update.h"

namespace ds::optimizers {
namespace {

void check_segments(const std::vector<Segment>& segments, int64_t length, const std::vector<ParameterInfo>& parameters,
                    const char* what) {
  for (const Segment& segment : segments) {
    require(segment.parameter >= 0 && segment.parameter < static_cast<int64_t>(parameters.size()), what,
            ": expected a parameter index below ", parameters.size(), ", found ", segment.parameter);
    const ParameterInfo& parameter = parameters[static_cast<size_t>(segment.parameter)];
    require(segment.length >= 0 && segment.parameter_offset >= 0 &&
                segment.parameter_offset + segment.length <= parameter.numel,
            what, ": expected a range inside the ", parameter.numel, " elements of ", parameter.name, ", found ",
            segment.length, " elements from ", segment.parameter_offset);
    require(segment.slice_offset >= 0 && segment.slice_offset + segment.length <= length, what,
            ": expected a range inside ", length, " elements, found ", segment.length, " elements from ",
            segment.slice_offset, " (", parameter.name, ")");
  }
}

}  // namespace

ShardOptimizer::ShardOptimizer(std::vector<GroupOptions> groups) : groups_(std::move(groups)) {}

ShardOptimizer::~ShardOptimizer() = default;

SliceOptimizer::SliceOptimizer(std::vector<GroupOptions> groups) : ShardOptimizer(std::move(groups)) {}

SliceOptimizer::~SliceOptimizer() = default;

int64_t SliceOptimizer::slice_count() const { return static_cast<int64_t>(slices_.size()); }

const Slice& SliceOptimizer::slice(int64_t index) const { return slices_.at(static_cast<size_t>(index)); }

const GroupOptions& SliceOptimizer::step_group(const Slice& slice) const {
  return step_groups_[static_cast<size_t>(slice.group)];
}

at::Tensor SliceOptimizer::weights(int64_t index) { return slice(index).master; }

void SliceOptimizer::begin_step() {
  for (const Slice& slice : slices_) {
    if (slice.row_width > 0) require_row_wise(name(), groups_[static_cast<size_t>(slice.group)]);
  }
  ++step_count_;
  step_groups_ = groups_;
}

int64_t SliceOptimizer::add_slice(Slice slice, const StateMemory& state_memory) {
  const at::Tensor& master = slice.master;
  require(master.defined() && master.dim() == 1 && master.is_contiguous() && at::isFloatingType(master.scalar_type()),
          "add_slice: expected a flat contiguous tensor of floating point, found ", describe(master));
  require(slice.group >= 0 && slice.group < static_cast<int>(groups_.size()), "add_slice: expected a group below ",
          groups_.size(), ", found ", slice.group);
  ensure(slice.row_width == 0 || master.numel() % slice.row_width == 0, "a slice of a row-wise table has whole rows");
  require(slice.exchange != nullptr, "add_slice: expected an exchange (one of size 1 without peers), found none");
  require(slice.parameters != nullptr || (slice.segments.empty() && slice.bucket_segments.empty()),
          "add_slice: expected the list of parameters that the segments index, found none");
  if (slice.parameters) {
    check_segments(slice.segments, master.numel(), *slice.parameters, "add_slice: segment of the slice");
    check_segments(slice.bucket_segments, master.numel() * slice.exchange->size(), *slice.parameters,
                   "add_slice: segment of the bucket");
  }
  slices_.push_back(std::move(slice));
  const int64_t index = slice_count() - 1;
  allocate_states(index, [&] {
    const at::Tensor& own = slices_.back().master;
    const at::ScalarType type = state_dtype_.value_or(state_type(own.scalar_type()));
    at::Tensor given = state_memory ? state_memory(index, own.numel(), type) : at::Tensor();
    if (given.defined()) return given;
    return at::zeros({own.numel()}, own.options().dtype(type).requires_grad(false));
  });
  return index;
}

Slice& SliceOptimizer::slice_for_update(int64_t index, const at::Tensor& gradient) {
  require(index >= 0 && index < slice_count(), "update: expected a slice index below ", slice_count(), ", found ",
          index);
  require(step_count_ > 0, "update: expected begin_step() before the updates of a step");
  Slice& slice = slices_[static_cast<size_t>(index)];
  require(gradient.defined() && gradient.dim() == 1 && gradient.is_contiguous() &&
              gradient.numel() == slice.master.numel() && gradient.device() == slice.master.device() &&
              at::isFloatingType(gradient.scalar_type()),
          "update: expected a flat gradient like the master, ", describe(slice.master), ", found ", describe(gradient));
  return slice;
}

void SliceOptimizer::update_into(int64_t index, const at::Tensor& gradient, double gradient_scale,
                                 const at::Tensor& copy) {
  update(index, gradient, gradient_scale);
  const at::NoGradGuard no_grad;
  at::Tensor(copy).copy_(slice(index).master);
}

void SliceOptimizer::update_all(const std::vector<SliceUpdate>& slices, const StepScale& scale) {
  require_host_scale(scale);
  for (const SliceUpdate& slice : slices) {
    if (slice.copy.defined()) {
      update_into(slice.index, slice.gradient, scale.factor, slice.copy);
    } else {
      update(slice.index, slice.gradient, scale.factor);
    }
  }
}

bool SliceOptimizer::takes_device_scale() const {
  const DeviceKernels kernels = traits().device_kernels;
  if (kernels == DeviceKernels::kNone) return false;
  const bool float32_only = kernels == DeviceKernels::kFloat32;
  const at::ScalarType states = state_dtype_.value_or(at::kFloat);
  if (states == at::kDouble || (float32_only && states != at::kFloat)) return false;
  return std::all_of(slices_.begin(), slices_.end(), [&](const Slice& slice) {
    return kernels_take(slice.master) && (!float32_only || slice.master.scalar_type() == at::kFloat);
  });
}

int64_t SliceOptimizer::state_bytes() {
  int64_t bytes = 0;
  std::set<const void*> counted;  // one tensor may have several names
  const auto count = [&](const NamedStates& named) {
    for (const auto& [name, state] : named) {
      if (counted.insert(state.unsafeGetTensorImpl()).second) bytes += static_cast<int64_t>(state.nbytes());
    }
  };
  for (int64_t i = 0; i < slice_count(); ++i) count(states(i));
  count(rank_states());
  count(shared_states());
  return bytes;
}

}  // namespace ds::optimizers
