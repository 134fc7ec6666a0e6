#include "loops/slice_leaves.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <cstddef>
#include <unordered_set>

#include "core/memory/storage_memory.h"
#include "core/text.h"
#include "zero/partition.h"

namespace ds::loops {
namespace {

constexpr const char* kMark =
    ": its gradient is not here: fully_shard has reduced it into the gradients of the ranks' slices. An optimizer made "
    "before fully_shard, or over model->parameters(), trains nothing: make it over sharded->parameters(), and clip "
    "with "
    "sharded->clip_grad_norm_()";

// Makes a gradient that throws kMark when its memory is read.
at::Tensor mark_of(const zero::Parameter& parameter) {
  return unreadable_tensor(parameter.tensor, parameter.tensor.sizes(), cat("parameter ", parameter.name, kMark));
}

}  // namespace

GradientMarks::GradientMarks(const std::vector<zero::Parameter>& parameters) : parameters_(parameters) {
  // A second backward() without a forward in between would add to the marks, before the reducer's hooks begin the pass.
  for (const zero::Parameter& parameter : parameters_) {
    hooks_.emplace_back(parameter.tensor, parameter.tensor.register_hook([this](const at::Tensor&) { take_away(); }));
  }
}

GradientMarks::~GradientMarks() {
  for (const auto& [parameter, hook] : hooks_) parameter.remove_hook(hook);
  take_away();
}

void GradientMarks::put() {
  marks_.clear();
  for (const zero::Parameter& parameter : parameters_) {
    if (parameter.tensor.grad().defined()) continue;
    marks_.push_back(mark_of(parameter));
    parameter.tensor.mutable_grad() = marks_.back();
  }
}

void GradientMarks::take_away() {
  if (marks_.empty()) return;
  std::unordered_set<const void*> marks;
  for (const at::Tensor& mark : marks_) marks.insert(mark.unsafeGetTensorImpl());
  marks_.clear();
  for (const zero::Parameter& parameter : parameters_) {
    at::Tensor& gradient = parameter.tensor.mutable_grad();
    if (gradient.defined() && marks.contains(gradient.unsafeGetTensorImpl())) gradient.reset();
  }
}

std::vector<SliceLeaf> slice_leaves(const engine::ModelState& state) {
  std::vector<SliceLeaf> leaves(state.parameters.size());
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    const zero::BucketLayout& layout = state.buckets[b].layout();
    for (const Segment& whole : layout.segments) {
      const auto parameter = static_cast<size_t>(whole.parameter);
      leaves[parameter] = {.name = state.parameters[parameter].name,
                           .parameter = parameter,
                           .bucket = b,
                           .place = {.parameter = whole.parameter},
                           .tensor = {}};
    }
    for (const Segment& own : zero::slice_segments(layout, state.groups_of(b).shards.rank())) {
      leaves[static_cast<size_t>(own.parameter)].place = own;
    }
  }
  for (SliceLeaf& leaf : leaves) {
    const at::Tensor part = state.masters[leaf.bucket].narrow(0, leaf.place.slice_offset, leaf.place.length).detach();
    leaf.tensor = part.set_requires_grad(true);
  }
  return leaves;
}

void SliceGradients::expect(size_t buckets, const at::TensorOptions& options) {
  of_pass_.assign(buckets, {});
  options_ = options;
}

void SliceGradients::add(size_t bucket, const at::Tensor& own) {
  const at::NoGradGuard no_grad;
  at::Tensor& sum = of_pass_[bucket];
  if (sum.defined()) {
    sum.add_(own.to(options_.device()));
    return;
  }
  sum = at::empty(own.sizes(), options_);
  sum.copy_(own);  // the reducer's memory is used again
}

void SliceGradients::clear() { of_pass_.assign(of_pass_.size(), {}); }

void SliceGradients::hand_out(const std::vector<SliceLeaf>& leaves, const std::vector<zero::Parameter>& parameters) {
  const at::NoGradGuard no_grad;
  for (const SliceLeaf& leaf : leaves) {
    const at::Tensor& made = of_pass_[leaf.bucket];
    if (!made.defined() || !parameters[leaf.parameter].tensor.requires_grad()) continue;
    // No view as autograd counts them: Optimizer::zero_grad() detaches gradients in place.
    const at::Tensor own = made.narrow(0, leaf.place.slice_offset, leaf.place.length).variable_data();
    at::Tensor& gradient = leaf.tensor.mutable_grad();
    if (gradient.defined()) {
      gradient.add_(own);
    } else {
      gradient = own;
    }
  }
  clear();
}

}  // namespace ds::loops
