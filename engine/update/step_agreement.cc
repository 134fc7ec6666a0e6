#include "engine/update/step_agreement.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/bitwise_right_shift.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <utility>

#include "checkpoint/block_checksum.h"
#include "comm/agreement.h"
#include "core/check.h"
#include "core/check_time.h"
#include "engine/update/summable_digest.h"

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
    kSettings,
    kSame,
    kLoss = kSame,
    kValues,  // the mean of the data's projections
    kDelivered,
    kChanges,
    kPlaces
  };
};
using Numbers = std::array<int64_t, AxisPlace::kPlaces>;

constexpr double kLossTolerance = 1e-4;
// The tolerance for a mean of projections, which are near 1 in size: a batch of 1024 other numbers moves one by some
// 0.03, other last bits of float32 by 1e-7, of bfloat16 by 1e-4.
constexpr double kValuesTolerance = 1e-3;
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
  numbers[AxisPlace::kSettings] = static_cast<int64_t>(facts.settings);
  at::Tensor result = sent_to(device, host);
  if (facts.data.of_device.defined()) result.select(0, AxisPlace::kData).add_(facts.data.of_device);
  if (facts.loss.defined()) result.select(0, AxisPlace::kLoss).copy_(facts.loss.view(at::kLong));
  if (facts.data.projection.defined()) {
    const at::Tensor mean = facts.data.projection / static_cast<double>(facts.data.projections);
    const at::Tensor number = mean.view(at::kLong);
    result.select(0, AxisPlace::kValues).copy_(number.is_cpu() ? sent_to(device, number) : number);
  }
  return result;
}

double loss_of(const Numbers& numbers) { return std::bit_cast<double>(numbers[AxisPlace::kLoss]); }

// Tensors that are not split are computed alike on all ranks, on like devices to the bit.
bool same_loss(const Numbers& a, const Numbers& b) {
  if (a[AxisPlace::kHasLoss] != b[AxisPlace::kHasLoss]) return false;
  const double x = loss_of(a);
  const double y = loss_of(b);
  if (!std::isfinite(x) || !std::isfinite(y)) return std::isfinite(x) == std::isfinite(y);
  return std::abs(x - y) <= kLossTolerance * std::max({std::abs(x), std::abs(y), kLossTolerance});
}

double values_of(const Numbers& numbers) { return std::bit_cast<double>(numbers[AxisPlace::kValues]); }

uint64_t joined_changes(uint64_t before, const Numbers& numbers) {
  return before * kDigestFactor + static_cast<uint64_t>(numbers[AxisPlace::kChanges]);
}

constexpr const char* kInSettings = "have different settings of the update";

// Returns in what two ranks differ; null: in nothing.
const char* difference(const Numbers& a, const Numbers& b) {
  if (a[AxisPlace::kStep] != b[AxisPlace::kStep]) return "are at different steps";
  if (a[AxisPlace::kSettings] != b[AxisPlace::kSettings]) return kInSettings;
  if (a[AxisPlace::kPosition] != b[AxisPlace::kPosition] || a[AxisPlace::kData] != b[AxisPlace::kData] ||
      std::abs(values_of(a) - values_of(b)) > kValuesTolerance)
    return "got different batches";
  if (!same_loss(a, b)) return "have different losses";
  if (a[AxisPlace::kAxisChanges] != b[AxisPlace::kAxisChanges])
    return "have changed or frozen parameters in different ways";
  if (a[AxisPlace::kGradientChanges] != b[AxisPlace::kGradientChanges])
    return "have changed the gradients of the step in different ways";
  return nullptr;
}

// Four digits of a digest, for a sentence: those of two that differ are the same by chance alone.
std::string short_text(uint64_t digest) {
  constexpr size_t kDigits = 4;
  const std::string text = checkpoint::to_hex(folded(digest));
  return text.substr(text.size() - kDigits);
}

std::string described(const Numbers& numbers, int rank) {
  std::string text = cat("rank ", rank, ": step ", numbers[AxisPlace::kStep]);
  if (numbers[AxisPlace::kDelivered] > 0) text += cat(", batch ", numbers[AxisPlace::kDelivered], " of its loader");
  if (numbers[AxisPlace::kHasLoss] != 0) text += cat(", loss ", loss_of(numbers));
  return text + cat(", data ", short_text(static_cast<uint64_t>(numbers[AxisPlace::kData])), ", of its numbers ",
                    values_of(numbers));
}

// The places of the numbers that all ranks of the world add up.
struct WorldPlace {
  enum : int64_t {
    kLoss,
    kWithLoss,
    kTokens,
    kAxisProblem,
    kStep,
    kPosition = kStep + 2,
    kChanges = kPosition + 2,
    kGradientChanges = kChanges + 2,
    kBuffers = kGradientChanges + 2,
    kSettings = kBuffers + 2,
    kStates = kSettings + kDigestNumbers,
    kShared = kStates + kDigestNumbers,
    kGathers  // of the first group; the others follow
  };
};

int64_t places(const StepFacts& facts) { return WorldPlace::kGathers + int64_t{2} * facts.gather_groups; }

// Puts the verdict of an axis, which the host does not know yet, into `values` on the device.
void put_axis(const AxisAgreement& axis, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  values.select(0, WorldPlace::kAxisProblem).copy_(axis.problem());
  const at::Tensor all = axis.changes();
  constexpr auto kBits = static_cast<int64_t>(kFoldedBits);
  at::Tensor changes = all.bitwise_and(kBits);
  for (const int shift : {16, 32, 48})
    changes = changes.bitwise_xor(at::bitwise_right_shift(all, shift).bitwise_and(kBits));
  values.select(0, WorldPlace::kChanges).copy_(changes);
  values.select(0, WorldPlace::kChanges + 1).copy_(changes * changes);
}

}  // namespace

AxisAgreement::AxisAgreement(const AxisFacts& facts, const TensorParts& parts, c10::Device device)
    : ranks_(parts.ranks), world_ranks_(parts.world_ranks), cuts_batches_(parts.cuts_batches) {
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

// Compares the first rank with all others, as difference() does.
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
  const at::Tensor values = all_.narrow(1, AxisPlace::kValues, 1).contiguous().view(at::kDouble).flatten();
  const at::Tensor others = (values - values.narrow(0, 0, 1)).abs().gt(kValuesTolerance).any();
  return exact.logical_and(alike).logical_not().logical_or(others).to(at::kDouble);
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
    verdict.in_settings = what == kInSettings;
    const int a = world_ranks_.front();
    const int b = world_ranks_[rank];
    verdict.problem =
        cat("ranks ", a, " and ", b, " of one ", cuts_batches_ ? "sequence" : "tensor", " axis ", what, ". ",
            described(first, a), "; ", described(other, b), ". Each of the ", world_ranks_.size(),
            " ranks of the axis ", "has a part of the ", cuts_batches_ ? "sequences" : "layers", ": they run the same ",
            "calls on the same batches. Give data by engine->dp_world_size() and engine->communicator().rank(), not ",
            "by all ranks, and seed generators alike");
  }
  return verdict;
}

StepAgreement::StepAgreement(StepFacts facts, comm::Communicator& ranks, at::Device device)
    : facts_(std::move(facts)), ranks_(ranks), device_(device) {
  if (facts_.axis && device_.is_cpu()) read_axis();
  if (ranks_.size() == 1) return;
  const CheckTime::Scope time;
  const at::Tensor values = at::zeros({places(facts_)}, at::kDouble);
  auto* const numbers = values.mutable_data_ptr<double>();
  numbers[WorldPlace::kWithLoss] = facts_.loss.defined() ? 1.0 : 0.0;
  numbers[WorldPlace::kTokens] = facts_.tokens.value_or(0.0);
  numbers[WorldPlace::kAxisProblem] = facts_.axis_problem.empty() ? 0.0 : 1.0;
  put(numbers + WorldPlace::kStep, folded(static_cast<uint64_t>(facts_.step)));
  put(numbers + WorldPlace::kPosition, folded(facts_.position));
  put(numbers + WorldPlace::kChanges, folded(facts_.changes));
  put(numbers + WorldPlace::kGradientChanges, folded(facts_.gradient_changes));
  put(numbers + WorldPlace::kBuffers, folded(facts_.buffers));
  put_digest(numbers + WorldPlace::kSettings, facts_.settings->digest(StepSettings::Among::kDataRanks));
  put_digest(numbers + WorldPlace::kStates, facts_.settings->digest_of_states());
  put(numbers + WorldPlace::kGathers + int64_t{2} * facts_.gather_group, folded(facts_.gathers));
  values_ = sent_to(device_, values);
  if (facts_.loss.defined()) values_.select(0, WorldPlace::kLoss).copy_(facts_.loss);
  facts_.shared.put(values_.select(0, WorldPlace::kShared));
  if (facts_.axis) put_axis(*facts_.axis, values_);
  const CheckTime::Scope waiting(/*waits=*/true);  // where nothing else is under way it runs at once
  sum_ = ranks_.all_reduce(values_, comm::ReduceOp::kSum, "loss and agreement of a step");
}

void StepAgreement::begin_reading() {
  if (std::exchange(reading_, true)) return;  // also where there is nothing to read: a second copy would be waited for
  if (facts_.stages.defined()) stages_ = Readback(facts_.stages);
  if (ranks_.size() == 1) {
    sums_ = Readback(facts_.loss);
    return;
  }
  {
    const CheckTime::Scope waiting(/*waits=*/true);
    sum_.wait();
  }
  sums_ = Readback(values_);
  if (facts_.tokens) tokens_on_device_ = values_.narrow(0, WorldPlace::kTokens, 1);
  sum_ = {};
  values_.reset();
}

std::optional<double> StepAgreement::loss() const {
  if (!sums_.defined()) return std::nullopt;
  const auto* const numbers = sums_.numbers().const_data_ptr<double>();
  const double all = tokens();
  const double of_tokens = all == 0 ? 1.0 : all;  // no tokens: the loss of none of them
  if (ranks_.size() == 1) return numbers[0] / of_tokens;
  if (numbers[WorldPlace::kWithLoss] != ranks_.size()) return std::nullopt;
  return numbers[WorldPlace::kLoss] / (facts_.tokens ? of_tokens : ranks_.size());
}

double StepAgreement::tokens() const {
  if (!facts_.tokens || ranks_.size() == 1 || !sums_.defined()) return facts_.tokens.value_or(0.0);
  return sums_.numbers().const_data_ptr<double>()[WorldPlace::kTokens];
}

void StepAgreement::read_axis() {
  const auto axis = std::exchange(facts_.axis, nullptr);
  AxisVerdict verdict = axis->verdict();
  facts_.axis_in_settings = verdict.in_settings ? &axis->ranks() : nullptr;
  facts_.axis_problem = std::move(verdict.problem);
  facts_.changes = verdict.changes;
}

std::optional<double> StepAgreement::finish(bool& parted, bool updated) {
  const CheckTime::Scope time;
  if (facts_.axis) read_axis();
  begin_reading();
  const auto* const numbers = ranks_.size() == 1 ? nullptr : sums_.numbers().const_data_ptr<double>();
  const bool changes_differ = numbers && !all_equal(numbers + WorldPlace::kChanges, ranks_.size());
  parted = changes_differ || (updated && stages_part_models());
  require_same_over_stages(updated);
  if (ranks_.size() == 1) {
    parted = !facts_.axis_problem.empty() && (updated || facts_.changes != 0);
    require_same_along_axis(updated);
    return loss();
  }
  if (numbers[WorldPlace::kAxisProblem] > 0) {
    parted = updated || numbers[WorldPlace::kChanges] > 0;  // of any axis: all ranks say so alike
    require_same_along_axis(updated);
    throw UsageError("step(): ranks of another tensor axis do not agree; their message says which, and on what");
  }
  if (!all_equal(numbers + WorldPlace::kStep, ranks_.size())) explain("are at different steps");
  parted = changes_differ || (updated && (settings_differ() || states_differ()));
  if (settings_differ()) facts_.settings->explain_difference(StepSettings::Among::kDataRanks, ranks_, updated);
  if (states_differ()) facts_.settings->require_same_states(ranks_, updated);
  if (!all_equal(numbers + WorldPlace::kPosition, ranks_.size())) {
    explain(
        "have taken different numbers of batches from the engine's loader or sampler: one of them has left a batch "
        "out");
  }
  if (numbers[WorldPlace::kShared] != 0) explain(kOtherBatches);
  if (gathers_differ()) {
    parted = parted || updated;
    explain(
        "have run different operators at stage 3: parameters were gathered in another order, so that some were "
        "computed with in the place of others. All ranks run the same forwards together, also under NoGradGuard; where "
        "they cannot, run them in a scope of engine->gathered_parameters(model->parameters())");
  }
  if (changes_differ) {
    explain(
        "have changed or frozen parameters in different ways, so that their models are not the same any more. Load "
        "the same values on every rank, or change them in a scope of engine->gathered_parameters(parameters, "
        "/*modifier_rank=*/0). Values that each rank moves for one pass and puts back count as well: add such a move "
        "in forward, as torch::linear(x, weight + move)");
  }
  if (!all_equal(numbers + WorldPlace::kGradientChanges, ranks_.size())) {
    parted = updated;
    explain(
        "have changed the gradients of the step in different ways (clip_grad_norm_(), safe_set_full_grad(), .grad in "
        "place), with which their models would part. Change them alike on every rank");
  }
  return loss();
}

void StepAgreement::require_same_along_axis(bool updated) const {
  if (facts_.axis_in_settings != nullptr) {
    facts_.settings->explain_difference(StepSettings::Among::kTensorRanks, *facts_.axis_in_settings, updated);
  }
  require(facts_.axis_problem.empty(), "step(): ", facts_.axis_problem);
}

void StepAgreement::require_same_over_stages(bool updated) const {
  if (stages_differ()) {
    facts_.settings->explain_difference(StepSettings::Among::kStages, *facts_.world, updated);
  }
  if (micro_batches_differ()) {
    facts_.micro_batches->require_same(sums_of_micro_batches(), ranks_.rank(), *facts_.world, device_,
                                       updated ? "The step was applied" : "Nothing was applied");
  }
}

bool StepAgreement::settings_differ() const {
  if (ranks_.size() == 1 || !sums_.defined()) return false;
  return !digests_equal(sums_.numbers().const_data_ptr<double>() + WorldPlace::kSettings, ranks_.size());
}

bool StepAgreement::states_differ() const {
  return !digests_equal(sums_.numbers().const_data_ptr<double>() + WorldPlace::kStates, ranks_.size());
}

bool StepAgreement::stages_differ() const {
  return stages_.defined() && !digests_equal(stages_.numbers().const_data_ptr<double>(), facts_.world->size());
}

at::Tensor StepAgreement::sums_of_micro_batches() const { return stages_.numbers().slice(0, kDigestNumbers); }

bool StepAgreement::micro_batches_differ() const {
  return stages_.defined() && facts_.micro_batches && facts_.micro_batches->differ(sums_of_micro_batches());
}

bool StepAgreement::stages_part_models() const {
  return stages_differ() ||
         (micro_batches_differ() && facts_.micro_batches->differ_along_axis(sums_of_micro_batches()));
}

bool StepAgreement::differs() const {
  if (stages_differ() || micro_batches_differ()) return true;
  if (ranks_.size() == 1)
    return !facts_.axis_problem.empty() || (facts_.axis && !facts_.axis->verdict().problem.empty());
  if (!sums_.defined()) return false;
  const auto* const numbers = sums_.numbers().const_data_ptr<double>();
  const auto equal = [&](int64_t place) { return all_equal(numbers + place, ranks_.size()); };
  return numbers[WorldPlace::kAxisProblem] > 0 || numbers[WorldPlace::kShared] != 0 || !equal(WorldPlace::kStep) ||
         !equal(WorldPlace::kPosition) || !equal(WorldPlace::kChanges) || !equal(WorldPlace::kGradientChanges) ||
         settings_differ() || states_differ() || gathers_differ();
}

bool StepAgreement::gathers_differ() const {
  const auto* const numbers = sums_.numbers().const_data_ptr<double>() + WorldPlace::kGathers;
  for (int group = 0; group < facts_.gather_groups; ++group) {
    if (!all_equal(numbers + int64_t{2} * group, ranks_.size() / facts_.gather_groups)) return true;
  }
  return false;
}

bool StepAgreement::buffers_differ() const {
  if (ranks_.size() == 1 || !sums_.defined()) return false;
  return !all_equal(sums_.numbers().const_data_ptr<double>() + WorldPlace::kBuffers, ranks_.size());
}

// Every rank's own words, exchanged only now.
void StepAgreement::explain(const char* what) const {
  std::string own = cat("step ", facts_.step);
  if (facts_.delivered > 0) own += cat(", batch ", facts_.delivered, " of its loader");
  if (facts_.changes != 0) {
    own += facts_.last_changed.empty()
               ? ", with frozen parameters"
               : cat(", changed ", facts_.last_changed, " (values ", short_text(facts_.changes), ")");
  } else {
    own += ", no parameter changed";
  }
  own += facts_.gradient_changes == 0 ? ", gradients as reduced"
                                      : cat(", changed gradients (values ", short_text(facts_.gradient_changes), ")");
  if (facts_.shared.value.defined()) own += cat(", cut batches ", short_text(facts_.shared.number()));
  if (facts_.gathers != 0) own += cat(", gathered parameters (order ", short_text(facts_.gathers), ")");
  const std::vector<std::string> words = comm::texts_of_ranks(own, device_, ranks_, "what ranks say of a step");
  std::string list;
  for (size_t rank = 0; rank < words.size(); ++rank) {
    list += cat(rank == 0 ? "" : "; ", "rank ", rank, ": ", words[rank]);
  }
  throw UsageError(cat("step(): the ranks ", what, ". ", list, " (this is rank ", ranks_.rank(), ")"));
}

}  // namespace ds::engine
