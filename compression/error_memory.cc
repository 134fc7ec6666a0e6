#include "compression/error_memory.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/add.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "core/check.h"
#include "core/tensor_check.h"

namespace ds::compression {

bool all_finite(const at::Tensor& values) { return finiteness_of(values).item<bool>(); }

at::Tensor finiteness_of(const at::Tensor& values) {
  if (values.numel() == 0) return at::ones({}, values.options().dtype(at::kBool));
  const auto [least, most] = at::aminmax(values);  // NaN where one is
  return (most.to(at::kDouble) - least.to(at::kDouble)).isfinite();
}

ErrorMemory::ErrorMemory(std::vector<int64_t> numels, at::Device device, bool feedback) {
  errors_.resize(numels.size());
  for (size_t b = 0; feedback && b < numels.size(); ++b) {
    if (numels[b] > 0) errors_[b] = at::zeros({numels[b]}, at::TensorOptions().dtype(at::kFloat).device(device));
  }
}

Corrected ErrorMemory::open(size_t bucket, const at::Tensor& gradient) const {
  const at::Tensor& memory = errors_.at(bucket);
  const bool on_host = gradient.is_cpu();
  if (!memory.defined() || (on_host && !all_finite(gradient))) {
    return {.values = gradient, .error = {}, .scale = scale_};
  }
  require(memory.numel() == gradient.numel(), "ErrorMemory: bucket ", bucket, ": expected ", memory.numel(),
          " elements, found ", describe(gradient));
  at::Tensor error = on_host ? memory : at::empty_like(memory);
  at::nan_to_num_out(error, memory, /*nan=*/0.0, /*posinf=*/0.0, /*neginf=*/0.0);
  if (scale_ != 1.0) error.mul_(scale_);
  error.add_(gradient);
  if (on_host) return {.values = error, .error = error, .scale = scale_, .memory = memory};
  const at::Tensor finite = finiteness_of(gradient);
  at::where_out(error, finite, error, gradient.to(at::kFloat));
  return {.values = error, .error = error, .scale = scale_, .finite = finite, .memory = memory};
}

void ErrorMemory::close(Corrected& corrected) {
  if (!corrected.error.defined()) return;
  if (corrected.scale != 1.0) corrected.error.div_(corrected.scale);
  if (!corrected.finite.defined()) return;
  at::where_out(corrected.memory, corrected.finite, corrected.error, corrected.memory);
  corrected.values = corrected.error = corrected.memory;  // the copy goes
}

void ErrorMemory::give_up(Corrected& corrected, const at::Tensor& gradient) {
  if (!corrected.error.defined()) return;
  corrected.error.sub_(gradient);
  close(corrected);
}

void ErrorMemory::add(const Corrected& corrected, int64_t begin, const at::Tensor& error) {
  if (!corrected.error.defined()) return;
  at::Tensor place = corrected.memory.narrow(0, begin, error.numel());
  if (!corrected.finite.defined()) {
    if (all_finite(error)) place.add_(error, 1.0 / corrected.scale);
    return;
  }
  const at::Tensor counts = finiteness_of(error).logical_and_(corrected.finite);
  at::where_out(place, counts, at::add(place, error, 1.0 / corrected.scale), place);
}

std::vector<std::pair<std::string, at::Tensor>> ErrorMemory::memory() const {
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (size_t b = 0; b < errors_.size(); ++b) {
    if (errors_[b].defined()) result.emplace_back(cat("error.", b), errors_[b]);
  }
  return result;
}

void ErrorMemory::forget() {
  for (const at::Tensor& error : errors_) {
    if (error.defined()) error.zero_();
  }
}

}  // namespace ds::compression
