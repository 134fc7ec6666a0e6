#include "parallel/axis/axis.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "parallel/axis/collectives.h"

namespace ds::parallel {

Axis::Axis(std::shared_ptr<comm::Communicator> communicator) : communicator_(std::move(communicator)) {
  require(communicator_ != nullptr, "an axis needs the communicator of its ranks");
}

void Axis::join_ranks_of(const comm::Communicator* job, std::vector<int> ranks) {
  job_ = job;
  job_ranks_ = std::move(ranks);
}

bool Axis::has_ranks_of(const Axis& other) const {
  if (communicator_.get() == other.communicator_.get()) return true;
  return job_ != nullptr && job_ == other.job_ && job_ranks_ == other.job_ranks_;
}

at::Tensor Axis::joined_values(const at::Tensor& split) {
  const at::NoGradGuard no_grad;
  const Placement& placement = placement_of(split);
  const at::Tensor part = part_of(split);
  if (placement.addend) return all_reduce_sum(part, *this);
  return placement.cut ? all_gather_parts(part, placement, split.sizes()) : part.clone();
}

void Axis::note_join(const std::string& name, const std::vector<at::Tensor>& joined) {
  JoinedOperator& entry = joins_[name];
  entry.name = name;
  ++entry.calls;
  for (const at::Tensor& tensor : joined) {
    entry.bytes += tensor.numel() * tensor.element_size();
    const std::string parameter = split_name(tensor);
    if (parameter.empty() || entry.parameters.find(parameter) != std::string::npos) continue;
    entry.parameters += (entry.parameters.empty() ? "" : ", ") + parameter;
  }
  if (!told_.insert(name).second || rank() != 0 || !tells_joins_) return;
  const std::string of = entry.parameters.empty() ? std::string() : " (of " + entry.parameters + ")";
  log::warning("axis ", communicator_->name(), ": operator ", name, " has no rule for how its tensors are split; they ",
               "are joined", of,
               " and every rank computes the whole. The result is right, memory and time are those of ",
               "one rank. Told once for each operator");
}

std::vector<JoinedOperator> Axis::joined_operators() const {
  std::vector<JoinedOperator> result;
  for (const auto& [name, entry] : joins_) result.push_back(entry);
  return result;
}

std::shared_ptr<Axis> axis_of(const Placement& placement) { return std::static_pointer_cast<Axis>(placement.axis); }

}  // namespace ds::parallel
