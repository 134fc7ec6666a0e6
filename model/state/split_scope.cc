#include "model/state/split_scope.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <exception>

#include "comm/agreement.h"
#include "core/check.h"
#include "core/log.h"
#include "core/split/split_tensor.h"
#include "core/tensor_check.h"
#include "model/state/tensor_parts.h"
#include "zero/value_digest.h"

namespace ds::engine {

SplitScope::SplitScope(ModelState& state, const std::vector<at::Tensor>& parameters, bool modifies)
    : state_(state), modifies_(modifies) {
  for (const TensorParts::SplitParameter& one : state.tensor->parameters) {
    const auto is_same = [&](const at::Tensor& other) { return other.is_same(one.parameter); };
    const bool known =
        std::any_of(all_.begin(), all_.end(), [&](const Shown& other) { return is_same(other.parameter); });
    if (known || std::none_of(parameters.begin(), parameters.end(), is_same)) continue;
    all_.push_back(
        {.name = one.name, .parameter = one.parameter, .leaf = one.leaf, .part = part_of_parameter(one.parameter)});
  }
}

at::IntArrayRef SplitScope::sizes_of(const Shown& one) {
  return one.part ? at::IntArrayRef(one.part->whole_sizes()) : one.leaf.sizes();
}

void SplitScope::show() {
  const at::NoGradGuard no_grad;
  for (Shown& one : all_) {
    const at::Tensor whole = one.part ? state_.tensor->joined(one.leaf.detach(), *one.part) : one.leaf.detach().clone();
    if (!modifies_) one.digest = zero::digest_of(whole);
    one.split = make_whole(one.parameter, whole);
    one.version = one.parameter._version();
    ++shown_;
    ++state_.tensor->shown;
  }
}

std::optional<std::string> SplitScope::changed() const {
  for (size_t i = 0; i < shown_; ++i) {
    const at::Tensor values = all_[i].parameter.detach();
    const bool is_same = values.sizes() == sizes_of(all_[i]) && values.scalar_type() == all_[i].leaf.scalar_type() &&
                         all_[i].parameter._version() == all_[i].version && zero::digest_of(values) == all_[i].digest;
    if (!is_same) return all_[i].name;
  }
  return std::nullopt;
}

void SplitScope::require_shapes() const {
  std::exception_ptr failure;
  try {
    for (size_t i = 0; i < shown_; ++i) {
      const at::Tensor values = all_[i].parameter.detach();
      require(values.sizes() == sizes_of(all_[i]), "gathered parameters: parameter ", all_[i].name,
              ": expected the shape ", sizes_of(all_[i]), " that it had, found ", describe(values));
    }
  } catch (...) {
    failure = std::current_exception();
  }
  const int failed = comm::failed_rank(failure, state_.ranks.device, *state_.ranks.world);
  require(failed < 0, "gathered parameters: rank ", failed,
          " has a parameter of another shape, its message says which");
}

void SplitScope::share_wholes() {
  const at::NoGradGuard no_grad;
  require_shapes();
  for (size_t i = 0; i < shown_; ++i) {
    const Shown& one = all_[i];
    at::Tensor values = one.parameter.detach();
    values = values.to(one.leaf.device(), one.leaf.scalar_type()).contiguous();
    share_other(values);
    one.leaf.detach().copy_(one.part ? slice_of(values, *one.part) : values);
  }
}

void SplitScope::share_bucket(size_t bucket, const at::Tensor& flat) {
  const size_t trained = state_.buckets.size();
  const zero::ParameterBucket& of = bucket < trained ? state_.buckets[bucket] : state_.frozen_buckets[bucket - trained];
  const auto is_part = [](const zero::Parameter& parameter) { return parameter.part != nullptr; };
  if (std::none_of(of.parameters().begin(), of.parameters().end(), is_part)) return share_other(flat);
  ensure(std::all_of(of.parameters().begin(), of.parameters().end(), is_part), "a bucket has parts or wholes");
}

void SplitScope::share_other(const at::Tensor& values) {
  if (values.numel() > 0) state_.tensor->ranks->broadcast(values, 0, "changed parameters").wait();
}

void SplitScope::hide() noexcept {
  for (; shown_ > 0; --shown_, --state_.tensor->shown) {
    try {
      split_again(all_[shown_ - 1].parameter, all_[shown_ - 1].split);
    } catch (const std::exception& error) {
      log::error("gathered parameters: ", all_[shown_ - 1].name, ": ", error.what());
    }
  }
}

}  // namespace ds::engine
