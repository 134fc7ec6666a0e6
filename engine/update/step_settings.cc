#include "engine/update/step_settings.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/block_checksum.h"
#include "comm/agreement.h"
#include "core/check.h"
#include "core/splitmix64.h"
#include "core/text.h"
#include "core/text_hash.h"
#include "model/state/same_on_all_ranks.h"
#include "optim/client_states.h"

namespace ds::engine {
namespace {

constexpr int64_t kNoGroup = -1;

uint64_t joined_digest(uint64_t digest, uint64_t value) { return splitmix64(digest ^ splitmix64(value)); }

// The shortest text that reads back as the same number, because ranks may differ in the last digit.
std::string exact_text(double value) {
  std::array<char, 32> text{};
  char* const end = text.data() + text.size();
  constexpr double kLargestCount = 1e15;
  const bool is_count = std::abs(value) < kLargestCount && std::floor(value) == value;
  return {text.data(), is_count ? std::to_chars(text.data(), end, static_cast<int64_t>(value)).ptr
                                : std::to_chars(text.data(), end, value, std::chars_format::general).ptr};
}

}  // namespace

void StepSettings::note_value(const SetValue& set) {
  if (deps_.state.ranks.world->size() == 1) return;
  // Parts are equal only where each rank has all of a parameter.
  if (set.is_local && deps_.state.plan.partition_optimizer) return;
  const at::Tensor own = set.value.detach();
  const double norm = (own.element_size() < 4 ? own.to(at::kFloat) : own).norm().item().toDouble();
  const at::Tensor host = own.to(at::kCPU).contiguous();
  const uint64_t checksum = checkpoint::checksum(host.const_data_ptr(), host.nbytes());
  const std::string call = set.call;
  const std::string name =
      cat(call.substr(0, call.find('(')), "(", set.parameter, set.state.empty() ? "" : ", ", set.state, ")");
  values_[name] = {.digest = joined_digest(fnv1a(name), checksum),
                   .text = cat("values of norm ", exact_text(norm), ", checksum ", checkpoint::to_hex(checksum)),
                   .is_local = set.is_local,
                   .is_gradient = set.is_gradient};
}

void StepSettings::forget_gradients() {
  std::erase_if(values_, [](const auto& one) { return one.second.is_gradient; });
}

bool StepSettings::compares(const Kept& kept, Among among) {
  return among == Among::kDataRanks || (among == Among::kTensorRanks && !kept.is_local);
}

template <class Use>
void StepSettings::visit_groups(Among among, const Use& use) const {
  const ModelOptimizer& optimizer = deps_.state.optimizer;
  int64_t group = 0;
  if (optimizer.client) {
    if (among == Among::kStages) return;
    for (const torch::optim::OptimizerParamGroup& one : optimizer.client->param_groups()) {
      optimizers::visit_options(one.options(), [&](const char* what, double value) { use(what, value, group); });
      // Where each rank steps on its own shards, it has other states than the next one.
      const bool alike = among == Among::kDataRanks && !deps_.state.plan.partition_optimizer;
      if (alike || optimizer.steps_on_parameters()) {
        use("steps of all states", static_cast<double>(optimizers::counted_steps(*optimizer.client, one)), group);
      }
      ++group;
    }
    return;
  }
  if (!optimizer.own) return;
  const std::vector<optimizers::GroupOptions>& groups = optimizer.own->groups();
  if (among == Among::kStages && !deps_.one_group) return;
  for (const optimizers::GroupOptions& one : groups) {
    use("lr", one.lr, group);
    use("weight_decay", one.weight_decay, group);
    use("beta1", one.beta1, group);
    use("beta2", one.beta2, group);
    use("momentum", one.momentum, group);
    use("eps", one.eps, group);
    use("non_freeze", one.non_freeze ? 1.0 : 0.0, group);
    ++group;
  }
}

template <class Use>
void StepSettings::visit(Among among, const Use& use) const {
  use("gradient_accumulation_steps", static_cast<double>(deps_.micro_batches.per_update()), kNoGroup);
  use("micro-batches counted by step()", static_cast<double>(deps_.progress.micro_steps), kNoGroup);
  if (deps_.loss_scaler) use("loss scale", deps_.loss_scaler->scale(), kNoGroup);
  if (deps_.schedule) {
    use("last_batch_iteration of the lr scheduler", static_cast<double>(deps_.schedule->last_batch_iteration()),
        kNoGroup);
  }
  use("backward_mean() in the step", deps_.counts.used() ? 1.0 : 0.0, kNoGroup);
  if (among == Among::kTensorRanks) use("counts of backward_mean()", deps_.counts.own(), kNoGroup);
  visit_groups(among, use);
}

uint64_t StepSettings::digest(Among among) const {
  // The number of the step makes the digests of two settings differ in another way at each step.
  auto digest = static_cast<uint64_t>(deps_.progress.global_steps);
  visit(among, [&](const char* /*what*/, double value, int64_t /*group*/) {
    digest = joined_digest(digest, std::bit_cast<uint64_t>(value));
  });
  for (const auto& [name, kept] : values_) {
    if (compares(kept, among)) digest = joined_digest(digest, kept.digest);
  }
  return digest;
}

std::string StepSettings::lines(Among among) const {
  std::string text;
  visit(among, [&](const char* what, double value, int64_t group) {
    text += cat(what, group == kNoGroup ? "" : cat(" of parameter group ", group), '\t', exact_text(value), '\n');
  });
  for (const auto& [name, kept] : values_) {
    if (compares(kept, among)) text += cat(name, '\t', kept.text, '\n');
  }
  return text;
}

std::string StepSettings::difference(const std::string& lines, comm::Communicator& ranks) const {
  const std::string own = cat("rank ", deps_.state.ranks.world->rank(), '\n', lines);
  const std::vector<std::string> texts =
      comm::texts_of_ranks(own, deps_.state.ranks.device, ranks, "settings of a step");
  const auto split = [](std::string_view text) {
    const size_t end = std::min(text.find('\n'), text.size());
    return std::pair(text.substr(0, end), text.substr(std::min(end + 1, text.size())));
  };
  const auto [first_rank, first] = split(texts.front());
  for (const std::string& text : texts) {
    const auto [rank, other] = split(text);
    if (other != first) return differing_setting({first_rank, first}, {rank, other});
  }
  return {};
}

std::string StepSettings::outcome(bool updated) const {
  return cat(updated ? "The step was applied" : "Nothing was applied", " (this is rank ",
             deps_.state.ranks.world->rank(), ")");
}

void StepSettings::explain_difference(Among among, comm::Communicator& ranks, bool updated) const {
  const std::string what = difference(lines(among), ranks);
  throw UsageError(cat("step(): the ranks have different settings of the update: ",
                       what.empty() ? "They are the same by now" : what, ". Set the same on every ",
                       "rank. What a rank has measured, such as the loss that torch's ReduceLROnPlateauScheduler is ",
                       "given, has to be averaged over the ranks before it decides. ", outcome(updated)));
}

void StepSettings::require_same_states(comm::Communicator& ranks, bool updated) const {
  const std::string what = difference(client_states_.lines(), ranks);
  require(what.empty(), "step(): the program has changed the states of its optimizer since the last step, and the ",
          "ranks have different ones: ", what, ". Load the same file, or set the same values, on every rank. ",
          outcome(updated));
}

}  // namespace ds::engine
