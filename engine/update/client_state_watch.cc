#include "engine/update/client_state_watch.h"

#include <torch/optim/lbfgs.h>

#include <map>

#include "checkpoint/block_checksum.h"
#include "core/splitmix64.h"
#include "core/text.h"
#include "optim/client_states.h"
#include "zero/value_digest.h"

namespace ds::engine {
namespace {

uint64_t checksum_of(const at::Tensor& values) {
  return static_cast<uint64_t>(zero::device_checksum_of(values).item<int64_t>());
}

}  // namespace

optimizers::NamedStates client_tensors(torch::optim::OptimizerParamState& state) {
  optimizers::NamedStates result;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    if (tensor.defined()) result.emplace_back(name, tensor);
  };
  if (auto* const lbfgs = dynamic_cast<torch::optim::LBFGSParamState*>(&state)) {
    add("d", lbfgs->d());
    add("H_diag", lbfgs->H_diag());
    add("prev_flat_grad", lbfgs->prev_flat_grad());
  } else if (const auto fields = optimizers::fields_of(state)) {
    for (const auto& [name, tensor] : fields->tensors) add(name, *tensor);
  }
  return result;
}

template <class Use>
void ClientStateWatch::visit(const Use& use) const {
  const ModelOptimizer& optimizer = state_.optimizer;
  // Buckets are whole where they are not cut over ranks. In host memory or files a state has a life of its own.
  const bool alike = !state_.plan.partition_optimizer && state_.offloaded == nullptr;
  if (!optimizer.client || state_.ranks.part->size() == 1 || !(alike || optimizer.steps_on_parameters())) return;
  const auto& entries = optimizer.client->state();
  for (const torch::optim::OptimizerParamGroup& group : optimizer.client->param_groups()) {
    for (const at::Tensor& stepped : group.params()) {
      const auto entry = entries.find(stepped.unsafeGetTensorImpl());
      if (entry == entries.end() || !entry->second) continue;
      for (const auto& [name, values] : client_tensors(*entry->second)) use(stepped, name, values);
    }
  }
}

void ClientStateWatch::note() {
  seen_.clear();
  visit([&](const at::Tensor& /*stepped*/, const std::string& /*name*/, const at::Tensor& values) {
    seen_.push_back({values.unsafeGetTensorImpl(), values._version()});
  });
}

uint64_t ClientStateWatch::digest_of_changes() const {
  uint64_t digest = 0;
  size_t place = 0;
  visit([&](const at::Tensor& /*stepped*/, const std::string& /*name*/, const at::Tensor& values) {
    const Seen now{values.unsafeGetTensorImpl(), values._version()};
    if (place >= seen_.size() || seen_[place] != now) {
      digest = splitmix64(digest ^ splitmix64(place + 1)) ^ checksum_of(values);
    }
    ++place;
  });
  return digest;
}

std::string ClientStateWatch::lines() const {
  std::map<const void*, std::string> names;
  for (const zero::Parameter& parameter : state_.parameters) {
    names[parameter.tensor.unsafeGetTensorImpl()] = parameter.name;
  }
  std::string text;
  visit([&](const at::Tensor& stepped, const std::string& name, const at::Tensor& values) {
    // Where it steps on buckets, they are numbered as they come.
    const auto [known, is_new] = names.try_emplace(stepped.unsafeGetTensorImpl());
    if (is_new) known->second = cat("bucket ", names.size() - 1 - state_.parameters.size());
    text += cat("the optimizer state ", name, " of ", known->second, "\tvalues of norm ",
                values.norm().item().toDouble(), ", checksum ", checkpoint::to_hex(checksum_of(values)), '\n');
  });
  return text;
}

}  // namespace ds::engine
