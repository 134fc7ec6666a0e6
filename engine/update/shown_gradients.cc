#include "engine/update/shown_gradients.h"

#include <string>

#include "core/check.h"
#include "core/check_time.h"
#include "core/memory/storage_memory.h"
#include "model/state/finished_gradients.h"

namespace ds::engine {
namespace {

// Has the parameter's shape, and no memory. `like`: it, or the leaf of a split one.
at::Tensor unreadable_gradient(const std::string& name, const at::Tensor& like, at::IntArrayRef sizes,
                               const char* reason) {
  return unreadable_tensor(
      like, sizes,
      cat("the gradient of parameter ", name, " cannot be read by its .grad: ", reason,
          ". Read it with engine->safe_get_full_grad(parameter) and change it with safe_set_full_grad(); clip with ",
          "gradient_clipping in the config or engine->clip_grad_norm_(max_norm) in place of ",
          "torch::nn::utils::clip_grad_norm_()"));
}

// The memory of a parameter's gradient in its bucket. No view for autograd, so that zero_grad() of torch's optimizers,
// which detaches in place, comes as far as to take it away; and made at once, because there is one for each parameter
// and step.
at::Tensor alias_of(const at::Tensor& flat, const Segment& segment, const at::Tensor& like) {
  at::Tensor alias = at::detail::make_tensor<at::TensorImpl>(at::Storage(flat.storage()), flat.key_set(), flat.dtype());
  alias.unsafeGetTensorImpl()->set_storage_offset(flat.storage_offset() + segment.slice_offset);
  alias.unsafeGetTensorImpl()->set_sizes_contiguous(like.sizes());
  return alias;
}

// LibTorch's clip_grad_norm_() multiplies `.grad().data()`, which of a sparse tensor is a copy: nothing would be
// clipped.
constexpr const char* kIsRows = "it is kept as the rows of a sparse table";

const void* memory_of(const at::Tensor& gradient) {
  return gradient.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

}  // namespace

const char* ShownGradients::reason_against(After pass, const char* factor) const {
  const Plan& plan = state_.plan;
  if (pass == After::kPart) return "the accumulation goes on, until whose last backward() it is a part of the sum";
  if (pass == After::kUnreduced) return "it is that of this rank alone until step() reduces it";
  if (state_.tensor) {
    return "parameters are split over the tensor axis, and what goes over all .grad would leave parts out";
  }
  if (plan.partition_optimizer) return "at ZeRO stages 1 to 3 a rank has the slice that it updates";
  if (state_.gradients.reducer->keeps_local())
    return "the optimizer exchanges compressed momenta in place of gradients";
  if (state_.offloaded) return "it is kept in host memory";
  if (factor != nullptr) return factor;
  if (plan.gradient_dtype != plan.model_dtype) return "it is kept in another dtype than the parameter";
  return nullptr;
}

void ShownGradients::show(After pass, const char* factor) {
  if (state_.pipeline) return;
  showing_ = true;
  shown_.assign(state_.parameters.size(), at::Tensor());
  memory_.assign(shown_.size(), nullptr);
  changeable_.assign(shown_.size(), false);
  const char* const reason = reason_against(pass, factor);
  if (!reason) finish_gradients(state_);
  const CheckTime::Scope time;
  show_split(reason);
  for (size_t b = 0; b < state_.buckets.size(); ++b) {
    const at::Tensor flat = reason ? at::Tensor() : state_.gradients.reducer->gradient(b);
    for (const Segment& segment : state_.buckets[b].layout().segments) {
      const auto i = static_cast<size_t>(segment.parameter);
      const at::Tensor& tensor = state_.parameters[i].tensor;
      if (!tensor.requires_grad()) continue;
      const char* const against = reason == nullptr && state_.is_row_wise(b) ? kIsRows : reason;
      shown_[i] = against ? stand_in(i, against) : alias_of(flat, segment, tensor);
      changeable_[i] = against == nullptr;
      memory_[i] = memory_of(shown_[i]);
      tensor.mutable_grad() = shown_[i];
    }
  }
}

// The module's own split parameters, whose leaves alone get gradients.
void ShownGradients::show_split(const char* reason) {
  if (!state_.tensor || state_.tensor->shown > 0) return;
  const std::vector<TensorParts::SplitParameter>& split = state_.tensor->parameters;
  split_stand_ins_.resize(split.size());
  for (size_t i = 0; i < split.size(); ++i) {
    if (!split[i].leaf.requires_grad()) continue;
    at::Tensor& gradient = split_stand_ins_[i];
    if (!gradient.defined()) {
      gradient = unreadable_gradient(split[i].name, split[i].leaf, split[i].parameter.sizes(), reason);
    }
    split[i].parameter.mutable_grad() = gradient;
  }
}

const at::Tensor& ShownGradients::stand_in(size_t parameter, const char* reason) {
  std::vector<at::Tensor>& all = stand_ins_[reason];
  all.resize(state_.parameters.size());
  at::Tensor& gradient = all[parameter];
  const zero::Parameter& of = state_.parameters[parameter];
  if (!gradient.defined()) gradient = unreadable_gradient(of.name, of.tensor, of.tensor.sizes(), reason);
  return gradient;
}

void ShownGradients::require_untouched(const char* call) const {
  if (!showing_) return;
  const CheckTime::Scope time;
  for (size_t i = 0; i < shown_.size(); ++i) {
    if (!shown_[i].defined()) continue;
    const zero::Parameter& parameter = state_.parameters[i];
    const at::Tensor& gradient = parameter.tensor.grad();
    const bool same_memory = memory_of(shown_[i]) == memory_[i];  // or that of set_data()
    if (gradient.is_same(shown_[i]) && same_memory) continue;
    throw UsageError(
        cat(call, ": the gradient of parameter ", parameter.name, " was ",
            gradient.defined() ? "replaced" : "taken away", " since backward(). Expected its .grad as backward() ",
            "left it, inside an accumulation too. step() clears gradients by itself; to drop them before, call ",
            "engine->zero_grad() and begin again; to change them, engine->safe_set_full_grad(parameter, value)"));
  }
}

uint64_t ShownGradients::take_back() {
  if (!showing_) return 0;
  const CheckTime::Scope time;
  showing_ = false;
  uint64_t changes = 0;
  for (size_t i = 0; i < split_stand_ins_.size(); ++i) state_.tensor->parameters[i].parameter.mutable_grad().reset();
  for (size_t i = 0; i < shown_.size(); ++i) {
    if (!shown_[i].defined()) continue;
    // The version of a stand-in says nothing: it has no memory and stays from step to step.
    if (changeable_[i]) changes += static_cast<uint64_t>(shown_[i]._version());
    state_.parameters[i].tensor.mutable_grad().reset();
    shown_[i].reset();
  }
  return changes;
}

}  // namespace ds::engine
