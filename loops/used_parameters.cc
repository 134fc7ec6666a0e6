#include "loops/used_parameters.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "core/check.h"

namespace ds::loops {
namespace {

constexpr size_t kMostNames = 10;

}  // namespace

std::string UsedParameters::names_where(const std::vector<char>& flags, char value) const {
  std::string names;
  size_t found = 0;
  for (size_t i = 0; i < flags.size(); ++i) {
    if (flags[i] != value) continue;
    if (++found <= kMostNames) names += cat(found == 1 ? "" : ", ", parameters_[i].name);
  }
  return found > kMostNames ? cat(names, " and ", found - kMostNames, " more") : names;
}

void UsedParameters::require_all_used(const char* call) {
  const std::string missing = std::exchange(missing_, {});
  require(missing.empty(), call, ": the last backward() gave no gradient to ", missing, ". Expected every parameter ",
          "that requires a gradient to take part in the loss, on every rank. Where the model does not use all of them ",
          "in each pass, set .find_unused_parameters = true (or .static_graph, where these are always the same); ",
          "where it never does, freeze them (requires_grad_(false)) before the wrapper is made");
}

// One byte each: as many ranks as there may be have a largest one.
std::vector<char> UsedParameters::joined(const std::vector<char>& own, comm::Communicator& group) const {
  if (group.size() == 1) return own;
  at::Tensor flags = at::empty({static_cast<int64_t>(own.size())}, at::kByte);
  std::copy(own.begin(), own.end(), flags.mutable_data_ptr<uint8_t>());
  flags = flags.to(device_);
  group.all_reduce(flags, comm::ReduceOp::kMax, "parameters with gradients").wait();
  flags = flags.to(at::kCPU);
  const auto* const first = flags.const_data_ptr<uint8_t>();
  return {first, first + flags.numel()};
}

std::vector<char> UsedParameters::agree(std::vector<char> own, comm::Communicator& group) {
  if (rule_ == UnusedRule::kNone) {
    missing_ = names_where(own, 0);
    return {};
  }
  if (rule_ == UnusedRule::kAny) return joined(own, group);
  if (!agreed_) {
    used_ = joined(own, group);
    agreed_ = true;
    own_ = std::move(own);
    return used_;
  }
  // A rank that only took part in the first pass may use any of what others did.
  std::vector<char> changed(own.size());
  for (size_t i = 0; i < own.size(); ++i) {
    const bool differs = own_.empty() ? own[i] != 0 && used_[i] == 0 : own[i] != own_[i];
    changed[i] = differs ? 1 : 0;
  }
  const std::string names = names_where(changed, 1);
  require(names.empty(), "static_graph: expected each backward() to give gradients to the same parameters, found ",
          "another set than in the first one; it differs in ", names,
          ". Set .find_unused_parameters = true in place of .static_graph");
  if (own_.empty()) own_ = std::move(own);
  return used_;
}

void UsedParameters::take_part(comm::Communicator& group) {
  if (!exchanges()) return;
  std::vector<char> none(parameters_.size(), 0);
  std::vector<char> used = joined(none, group);
  if (rule_ != UnusedRule::kTheSame) return;
  used_ = std::move(used);
  agreed_ = true;
}

}  // namespace ds::loops
