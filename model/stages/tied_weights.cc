#include "model/stages/tied_weights.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "core/text.h"
#include "pipeline/stage_placement.h"

namespace ds::engine {

std::vector<TiedWeights> make_tied_weights(const pipeline::PipelineModule& module, comm::Communicator& ranks) {
  std::vector<TiedWeights> all;
  for (const pipeline::TiedLayers& tied : module.tied()) {
    TiedWeights weights;
    weights.ranks = ranks.new_group(tied.ranks, cat("tied ", tied.key));
    weights.parameters = module.tied_parameters(tied.key);
    weights.names = tied.names;
    all.push_back(std::move(weights));
  }
  return all;
}

int tie_of(const std::vector<TiedWeights>& all, const std::string& name) {
  const auto found = std::find_if(all.begin(), all.end(), [&](const TiedWeights& weights) {
    return weights.ranks && std::any_of(weights.names.begin(), weights.names.end(), [&](const std::string& tied) {
             return name == tied || name.starts_with(tied + ".");
           });
  });
  return found == all.end() ? -1 : static_cast<int>(found - all.begin());
}

bool is_tied_copy(const std::vector<TiedWeights>& all, const std::string& name) {
  const int tie = tie_of(all, name);
  return tie >= 0 && !all[static_cast<size_t>(tie)].is_first();
}

void broadcast_tied_weights(const std::vector<TiedWeights>& all) {
  const at::NoGradGuard no_grad;
  for (const TiedWeights& tied : all) {
    if (!tied.ranks) continue;
    for (const at::Tensor& parameter : tied.parameters) {
      const at::Tensor values = parameter.detach().contiguous();
      tied.ranks->broadcast(values, 0, "tied weights").wait();
      if (!values.is_alias_of(parameter)) parameter.detach().copy_(values);
    }
  }
}

}  // namespace ds::engine
