#include "compression/error_memory.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "core/check.h"
#include "core/tensor_check.h"

namespace ds::compression {

bool all_finite(const at::Tensor& values) {
  if (values.numel() == 0) return true;
  const auto [least, most] = at::aminmax(values);  // NaN where one is
  return std::isfinite((most.to(at::kDouble) - least.to(at::kDouble)).item<double>());
}

ErrorMemory::ErrorMemory(std::vector<int64_t> numels, at::Device device, bool feedback) {
  errors_.resize(numels.size());
  for (size_t b = 0; feedback && b < numels.size(); ++b) {
    if (numels[b] > 0) errors_[b] = at::zeros({numels[b]}, at::TensorOptions().dtype(at::kFloat).device(device));
  }
}

Corrected ErrorMemory::open(size_t bucket, const at::Tensor& gradient) const {
  const at::Tensor& error = errors_.at(bucket);
  if (!error.defined() || !all_finite(gradient)) return {.values = gradient, .error = {}, .scale = scale_};
  require(error.numel() == gradient.numel(), "ErrorMemory: bucket ", bucket, ": expected ", error.numel(),
          " elements, found ", describe(gradient));
  error.nan_to_num_(/*nan=*/0.0, /*posinf=*/0.0, /*neginf=*/0.0);
  if (scale_ != 1.0) error.mul_(scale_);
  error.add_(gradient);
  return {.values = error, .error = error, .scale = scale_};
}

void ErrorMemory::close(const Corrected& corrected) {
  if (corrected.error.defined() && corrected.scale != 1.0) corrected.error.div_(corrected.scale);
}

void ErrorMemory::give_up(const Corrected& corrected, const at::Tensor& gradient) {
  if (!corrected.error.defined()) return;
  corrected.error.sub_(gradient);
  close(corrected);
}

void ErrorMemory::add(const Corrected& corrected, int64_t begin, const at::Tensor& error) {
  if (!corrected.error.defined() || !all_finite(error)) return;
  corrected.error.narrow(0, begin, error.numel()).add_(error, 1.0 / corrected.scale);
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
