#include "engine/update/axis_agreement.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "core/check.h"
#include "core/check_time.h"

namespace ds::engine {
namespace {

// The places of the numbers that ranks of an axis exchange. The first ones, up to kSame, are the same on all ranks, to
// the bit.
struct AxisPlace {
  enum : size_t {
    kStep,
    kPosition,
    kHasLoss,
    kData,
    kAxisChanges,
    kGradientChanges,
    kSame,
    kLoss = kSame,
    kDelivered,
    kChanges,
    kPlaces
  };
};
using Numbers = std::array<int64_t, AxisPlace::kPlaces>;

constexpr double kLossTolerance = 1e-4;
constexpr uint64_t kDigestFactor = 0x9E3779B97F4A7C15;

at::Tensor numbers_of(const AxisFacts& facts, c10::Device device) {
  const at::NoGradGuard no_grad;
  const at::Tensor host = at::zeros({AxisPlace::kPlaces}, at::kLong);
  auto* const numbers = host.mutable_data_ptr<int64_t>();
  numbers[AxisPlace::kStep] = facts.step;
  numbers[AxisPlace::kDelivered] = facts.delivered;
  numbers[AxisPlace::kPosition] = static_cast<int64_t>(facts.position);
  numbers[AxisPlace::kHasLoss] = facts.loss.defined() ? 1 : 0;
  numbers[AxisPlace::kData] = static_cast<int64_t>(facts.data.of_host);
  numbers[AxisPlace::kChanges] = static_cast<int64_t>(facts.changes);
  numbers[AxisPlace::kAxisChanges] = static_cast<int64_t>(facts.axis_changes);
  numbers[AxisPlace::kGradientChanges] = static_cast<int64_t>(facts.gradient_changes);
  at::Tensor result = sent_to(device, host);
  if (facts.data.of_device.defined()) result.select(0, AxisPlace::kData).add_(facts.data.of_device);
  if (facts.loss.defined()) result.select(0, AxisPlace::kLoss).copy_(facts.loss.view(at::kLong));
  return result;
}

double loss_of(const Numbers& numbers) { return std::bit_cast<double>(numbers[AxisPlace::kLoss]); }

// Plain values are computed alike on all ranks, on like devices to the bit.
bool same_loss(const Numbers& a, const Numbers& b) {
  if (a[AxisPlace::kHasLoss] != b[AxisPlace::kHasLoss]) return false;
  const double x = loss_of(a);
  const double y = loss_of(b);
  if (!std::isfinite(x) || !std::isfinite(y)) return std::isfinite(x) == std::isfinite(y);
  return std::abs(x - y) <= kLossTolerance * std::max({std::abs(x), std::abs(y), kLossTolerance});
}

uint64_t joined_changes(uint64_t before, const Numbers& numbers) {
  return before * kDigestFactor + static_cast<uint64_t>(numbers[AxisPlace::kChanges]);
}

// What of two ranks is not the same.
const char* difference(const Numbers& a, const Numbers& b) {
  if (a[AxisPlace::kStep] != b[AxisPlace::kStep]) return "are at different steps";
  if (a[AxisPlace::kPosition] != b[AxisPlace::kPosition] || a[AxisPlace::kData] != b[AxisPlace::kData])
    return "got different batches";
  if (!same_loss(a, b)) return "have different losses";
  if (a[AxisPlace::kAxisChanges] != b[AxisPlace::kAxisChanges])
    return "have changed or frozen parameters in different ways";
  if (a[AxisPlace::kGradientChanges] != b[AxisPlace::kGradientChanges])
    return "have changed the gradients of the step in different ways";
  return nullptr;
}

std::string described(const Numbers& numbers, int rank) {
  std::string text = cat("rank ", rank, ": step ", numbers[AxisPlace::kStep]);
  if (numbers[AxisPlace::kDelivered] > 0) text += cat(", batch ", numbers[AxisPlace::kDelivered], " of its loader");
  if (numbers[AxisPlace::kHasLoss] != 0) text += cat(", loss ", loss_of(numbers));
  return text + cat(", digest of its data ", static_cast<uint64_t>(numbers[AxisPlace::kData]) % 1000000);
}

}  // namespace

AxisAgreement::AxisAgreement(const AxisFacts& facts, const TensorParts& parts, c10::Device device)
    : world_ranks_(parts.world_ranks) {
  const CheckTime::Scope time;
  const at::Tensor own = numbers_of(facts, device);
  const at::Tensor all = at::empty({own.numel() * parts.ranks->size()}, own.options());
  {
    const CheckTime::Scope waiting(/*waits=*/true);
    parts.ranks->all_gather(all, own, "agreement of a tensor axis").wait();
  }
  all_ = all.view({parts.ranks->size(), own.numel()});
  numbers_ = Readback(all_);
}

// As difference(), of the first rank and all others.
at::Tensor AxisAgreement::problem() const {
  const at::NoGradGuard no_grad;
  const at::Tensor same = all_.narrow(1, 0, AxisPlace::kSame);
  const at::Tensor exact = same.eq(same.narrow(0, 0, 1)).all();
  const at::Tensor losses = all_.narrow(1, AxisPlace::kLoss, 1).contiguous().view(at::kDouble).flatten();
  const at::Tensor first = losses.narrow(0, 0, 1);
  const at::Tensor finite = at::isfinite(losses);
  const at::Tensor limit = at::maximum(losses.abs(), first.abs()).clamp_min(kLossTolerance) * kLossTolerance;
  const at::Tensor close = (losses - first).abs().le(limit).logical_or(finite.logical_not());
  const at::Tensor alike = finite.eq(finite.narrow(0, 0, 1)).logical_and(close).all();
  return exact.logical_and(alike).logical_not().to(at::kDouble);
}

at::Tensor AxisAgreement::changes() const {
  const at::NoGradGuard no_grad;
  at::Tensor result = all_.select(0, 0).select(0, AxisPlace::kChanges);
  for (int64_t rank = 1; rank < all_.size(0); ++rank) {
    result = result * static_cast<int64_t>(kDigestFactor) + all_.select(0, rank).select(0, AxisPlace::kChanges);
  }
  return result;
}

AxisVerdict AxisAgreement::verdict() const {
  const CheckTime::Scope time;
  const at::Tensor all = numbers_.numbers();
  const auto of_rank = [&](size_t rank) {
    Numbers result{};
    std::copy_n(all.const_data_ptr<int64_t>() + AxisPlace::kPlaces * rank, result.size(), result.begin());
    return result;
  };
  const Numbers first = of_rank(0);
  AxisVerdict verdict{.problem = {}, .changes = joined_changes(0, first)};
  for (size_t rank = 1; rank < world_ranks_.size(); ++rank) {
    const Numbers other = of_rank(rank);
    verdict.changes = joined_changes(verdict.changes, other);
    const char* const what = difference(first, other);
    if (what == nullptr || !verdict.problem.empty()) continue;
    const int a = world_ranks_.front();
    const int b = world_ranks_[rank];
    verdict.problem =
        cat("ranks ", a, " and ", b, " of one tensor axis ", what, ". ", described(first, a), "; ", described(other, b),
            ". Each of the ", world_ranks_.size(), " ranks of the axis has a part of the layers: they run the same ",
            "calls on the same batches. Give data by engine->dp_world_size() and engine->communicator().rank(), not ",
            "by all ranks, and seed generators alike");
  }
  return verdict;
}

}  // namespace ds::engine
