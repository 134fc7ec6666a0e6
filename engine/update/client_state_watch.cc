#include "engine/update/client_state_watch.h"

#include <torch/optim/lbfgs.h>

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
  if (!state_.optimizer.steps_on_parameters() || state_.ranks.part->size() == 1) return;
  const auto& entries = state_.optimizer.client->state();
  for (const zero::Parameter& parameter : state_.parameters) {
    const auto entry = entries.find(parameter.tensor.unsafeGetTensorImpl());
    if (entry == entries.end() || !entry->second) continue;
    for (const auto& [name, values] : client_tensors(*entry->second)) use(parameter.name, name, values);
  }
}

void ClientStateWatch::note() {
  seen_.clear();
  visit([&](const std::string& /*parameter*/, const std::string& /*name*/, const at::Tensor& values) {
    seen_.push_back({values.unsafeGetTensorImpl(), values._version()});
  });
}

uint64_t ClientStateWatch::digest_of_changes() const {
  uint64_t digest = 0;
  size_t place = 0;
  visit([&](const std::string& /*parameter*/, const std::string& /*name*/, const at::Tensor& values) {
    const Seen now{values.unsafeGetTensorImpl(), values._version()};
    if (place >= seen_.size() || seen_[place] != now) {
      digest = splitmix64(digest ^ splitmix64(place + 1)) ^ checksum_of(values);
    }
    ++place;
  });
  return digest;
}

std::string ClientStateWatch::lines() const {
  std::string text;
  visit([&](const std::string& parameter, const std::string& name, const at::Tensor& values) {
    text += cat("the optimizer state ", name, " of ", parameter, "\tvalues of norm ", values.norm().item().toDouble(),
                ", checksum ", checkpoint::to_hex(checksum_of(values)), '\n');
  });
  return text;
}

}  // namespace ds::engine
