#include "engine/update/axis_agreement.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "core/check.h"
#include "core/check_time.h"

namespace ds::engine {
namespace {

enum Place : size_t {
  kStep,
  kDelivered,
  kPosition,
  kLoss,
  kHasLoss,
  kData,
  kChanges,
  kAxisChanges,
  kGradientChanges,
  kPlaces
};
using Numbers = std::array<int64_t, kPlaces>;

Numbers numbers_of(const AxisFacts& facts) {
  Numbers numbers{};
  numbers[kStep] = facts.step;
  numbers[kDelivered] = facts.delivered;
  numbers[kPosition] = static_cast<int64_t>(facts.position);
  numbers[kLoss] = std::bit_cast<int64_t>(facts.loss.value_or(0));
  numbers[kHasLoss] = facts.loss ? 1 : 0;
  numbers[kData] = static_cast<int64_t>(facts.data);
  numbers[kChanges] = static_cast<int64_t>(facts.changes);
  numbers[kAxisChanges] = static_cast<int64_t>(facts.axis_changes);
  numbers[kGradientChanges] = static_cast<int64_t>(facts.gradient_changes);
  return numbers;
}

double loss_of(const Numbers& numbers) { return std::bit_cast<double>(numbers[kLoss]); }

// Plain values are computed alike on all ranks, on like devices to the bit.
bool same_loss(const Numbers& a, const Numbers& b) {
  constexpr double kTolerance = 1e-4;
  if (a[kHasLoss] != b[kHasLoss]) return false;
  const double x = loss_of(a);
  const double y = loss_of(b);
  if (!std::isfinite(x) || !std::isfinite(y)) return std::isfinite(x) == std::isfinite(y);
  return std::abs(x - y) <= kTolerance * std::max({std::abs(x), std::abs(y), kTolerance});
}

uint64_t joined_changes(uint64_t before, const Numbers& numbers) {
  return before * 0x9E3779B97F4A7C15 + static_cast<uint64_t>(numbers[kChanges]);
}

// What of two ranks is not the same.
const char* difference(const Numbers& a, const Numbers& b) {
  if (a[kStep] != b[kStep]) return "are at different steps";
  if (a[kPosition] != b[kPosition] || a[kData] != b[kData]) return "got different batches";
  if (!same_loss(a, b)) return "have different losses";
  if (a[kAxisChanges] != b[kAxisChanges]) return "have changed or frozen parameters in different ways";
  if (a[kGradientChanges] != b[kGradientChanges]) return "have changed the gradients of the step in different ways";
  return nullptr;
}

std::string described(const Numbers& numbers, int rank) {
  std::string text = cat("rank ", rank, ": step ", numbers[kStep]);
  if (numbers[kDelivered] > 0) text += cat(", batch ", numbers[kDelivered], " of its loader");
  if (numbers[kHasLoss] != 0) text += cat(", loss ", loss_of(numbers));
  return text + cat(", digest of its data ", static_cast<uint64_t>(numbers[kData]) % 1000000);
}

}  // namespace

AxisVerdict axis_verdict(const AxisFacts& facts, const TensorParts& parts, c10::Device device) {
  const CheckTime::Scope time;
  const Numbers numbers = numbers_of(facts);
  const auto count = static_cast<int64_t>(numbers.size());
  at::Tensor own = at::empty({count}, at::kLong);
  std::copy(numbers.begin(), numbers.end(), own.mutable_data_ptr<int64_t>());
  own = own.to(device);
  at::Tensor all = at::empty({count * parts.ranks->size()}, own.options());
  {
    const CheckTime::Scope waiting(/*waits=*/true);
    parts.ranks->all_gather(all, own, "agreement of a tensor axis").wait();
  }
  all = all.to(at::kCPU);
  const auto of_rank = [&](int rank) {
    Numbers result{};
    std::copy_n(all.const_data_ptr<int64_t>() + count * rank, numbers.size(), result.begin());
    return result;
  };
  const Numbers first = of_rank(0);
  AxisVerdict verdict{.problem = {}, .changes = joined_changes(0, first)};
  for (int rank = 1; rank < parts.ranks->size(); ++rank) {
    const Numbers other = of_rank(rank);
    verdict.changes = joined_changes(verdict.changes, other);
    const char* const what = difference(first, other);
    if (what == nullptr || !verdict.problem.empty()) continue;
    const int a = parts.world_ranks.front();
    const int b = parts.world_ranks[static_cast<size_t>(rank)];
    verdict.problem =
        cat("ranks ", a, " and ", b, " of one tensor axis ", what, ". ", described(first, a), "; ", described(other, b),
            ". Each of the ", parts.ranks->size(), " ranks of the axis has a part of the layers: they run the same ",
            "calls on the same batches. Give data by engine->dp_world_size() and engine->communicator().rank(), not ",
            "by all ranks, and seed generators alike");
  }
  return verdict;
}

}  // namespace ds::engine
