#include "core/parity/run_differences.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "core/parity/parity_names.h"

namespace ds {
namespace {

// A gradient whose norm is a smaller part of the parameter's share in the norm of the model is rounding.
constexpr double kSmallGradient = 1e-3;
// The relative rounding of a float32 weight that is allowed.
constexpr double kRounding = 4 * 1.2e-7;

PairSums sums_of(const RecordedTensor& found, const RecordedTensor* expected) {
  PairSums sums;
  if (expected == nullptr || expected->count != found.count) {
    sums.difference = std::numeric_limits<double>::infinity();
    return sums;
  }
  for (size_t i = 0; i < found.count; ++i) sums.add(found[i], (*expected)[i]);
  return sums;
}

// The sums over the gradients of all parameters, and their number of elements.
struct WholeModel {
  double squares = 0;
  size_t elements = 0;
};

WholeModel whole_model(const RecordedTensors& tensors, const std::string& kind) {
  WholeModel all;
  for (const auto& [name, tensor] : tensors.all()) {
    if (!name.starts_with(kind)) continue;
    for (size_t i = 0; i < tensor.count; ++i) all.squares += tensor[i] * tensor[i];
    all.elements += tensor.count;
  }
  return all;
}

}  // namespace

double PairSums::rest() const {
  if (found == 0 && expected > 0) return 0;
  if (expected == 0 || !std::isfinite(difference)) return 1;
  return std::sqrt(std::max(0.0, 1 - both * both / expected / found));
}

std::vector<double> joined(const std::vector<std::vector<double>>& lists) {
  std::vector<double> all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

double mean_of(const std::vector<double>& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), 0.0) / static_cast<double>(numbers.size());
}

double mean_loss(const RecordedStep& step) { return step.loss ? *step.loss : mean_of(joined(step.losses)); }

double relative_difference(double a, double b) {
  if (!std::isfinite(a) || !std::isfinite(b)) {
    return std::isfinite(a) == std::isfinite(b) ? 0.0 : std::numeric_limits<double>::infinity();
  }
  return std::abs(a - b) / std::max({std::abs(a), std::abs(b), 1e-6});
}

std::vector<ParameterDifference> start_differences(const RecordedRun& run, const RecordedRun& reference) {
  const RecordedTensors found = run.tensors(0);
  const RecordedTensors expected = reference.tensors(0);
  std::vector<ParameterDifference> result;
  for (const auto& [name, tensor] : found.all()) {
    const PairSums sums = sums_of(tensor, expected.find(name));
    result.push_back({.name = name.substr(name.find('/') + 1),
                      .sums = sums,
                      .relative = std::sqrt(sums.difference / std::max(sums.expected, 1e-12))});
  }
  return result;
}

std::vector<ParameterDifference> gradient_differences(const RecordedRun& run, const RecordedRun& reference,
                                                      size_t step) {
  const RecordedTensors found = run.tensors(step);
  const RecordedTensors expected = reference.tensors(step);
  const std::string kind = kParityGradient;
  const WholeModel all = whole_model(expected, kind);
  std::vector<ParameterDifference> result;
  for (const auto& [name, tensor] : found.all()) {
    if (!name.starts_with(kind)) continue;
    const PairSums sums = sums_of(tensor, expected.find(name));
    const double share = all.squares * static_cast<double>(tensor.count) / static_cast<double>(all.elements);
    const double floor = kSmallGradient * std::sqrt(share);
    const double scale = std::max({std::sqrt(sums.expected), floor, 1e-30});
    const bool none = std::isnan(sums.difference) && std::isnan(sums.expected) && std::isnan(sums.found);
    result.push_back({.name = name.substr(kind.size()),
                      .sums = sums,
                      .relative = none ? 0.0 : std::sqrt(sums.difference) / scale,
                      .is_small = std::sqrt(sums.expected) < floor});
  }
  for (const auto& [name, tensor] : expected.all()) {
    if (!name.starts_with(kind) || found.find(name) != nullptr) continue;
    constexpr double kMissing = std::numeric_limits<double>::infinity();
    result.push_back({.name = name.substr(kind.size()), .sums = {.difference = kMissing}, .relative = kMissing});
  }
  return result;
}

std::vector<ParameterDifference> update_differences(const RecordedRun& run, const RecordedRun& reference, size_t step,
                                                    const std::vector<ParameterDifference>& gradients) {
  std::set<std::string> small;
  for (const ParameterDifference& gradient : gradients) {
    if (gradient.is_small) small.insert(gradient.name);
  }
  const RecordedTensors found = run.tensors(step);
  const RecordedTensors found_before = run.tensors(step - 1);
  const RecordedTensors expected = reference.tensors(step);
  const RecordedTensors expected_before = reference.tensors(step - 1);
  const std::string kind = kParityWeight;
  std::vector<ParameterDifference> result;
  for (const auto& [name, tensor] : found.all()) {
    if (!name.starts_with(kind) || small.contains(name.substr(kind.size()))) continue;
    const RecordedTensor* const before = found_before.find(name);
    const RecordedTensor* const other = expected.find(name);
    const RecordedTensor* const other_before = expected_before.find(name);
    if (before == nullptr || other == nullptr || other_before == nullptr) continue;
    PairSums sums;
    double weights = 0;
    for (size_t i = 0; i < tensor.count; ++i) {
      sums.add(tensor[i] - (*before)[i], (*other)[i] - (*other_before)[i]);
      weights += tensor[i] * tensor[i];
    }
    const double beyond = std::sqrt(sums.difference) - kRounding * std::sqrt(weights);
    const double scale = std::max(std::sqrt(sums.expected), 1e-30);
    result.push_back({.name = name.substr(kind.size()),
                      .sums = sums,
                      .relative = std::isnan(weights) ? 0.0 : std::max(beyond, 0.0) / scale});
  }
  return result;
}

}  // namespace ds
