#include "loops/gradient_marks.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <cstddef>
#include <unordered_set>

#include "core/memory/storage_memory.h"
#include "core/text.h"

namespace ds::loops {
namespace {

constexpr const char* kMark =
    ": its gradient is not here: fully_shard has reduced it into the gradients of the ranks' slices. An optimizer made "
    "before fully_shard, or over model->parameters(), trains nothing: make it over sharded->parameters(), and clip "
    "with "
    "sharded->clip_grad_norm_()";

// Makes a gradient that throws kMark when its memory is read.
at::Tensor mark_of(const zero::Parameter& parameter) {
  const at::NoGradGuard no_grad;
  const at::Tensor& like = parameter.tensor;
  at::Tensor none = at::empty({0}, like.options().requires_grad(false));
  const size_t bytes = static_cast<size_t>(like.numel()) * like.element_size();
  at::TensorImpl* const impl = none.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(unreadable_storage(like.device(), bytes, cat("parameter ", parameter.name, kMark)));
  impl->set_sizes_contiguous(like.sizes());
  return none;
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

}  // namespace ds::loops
