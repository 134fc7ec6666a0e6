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
    weights.name = tied.name;
    all.push_back(std::move(weights));
  }
  return all;
}

bool is_tied_copy(const std::vector<TiedWeights>& all, const std::string& name) {
  return std::any_of(all.begin(), all.end(), [&](const TiedWeights& weights) {
    return weights.ranks && !weights.is_first() && name.starts_with(weights.name + ".");
  });
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
