#include "model/state/parameter_scope.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <set>
#include <utility>

#include "core/check.h"
#include "model/state/split_scope.h"
#include "zero/gather/gathered_scope.h"

namespace ds::engine {

// Copies of a weight on other stages would keep the old values for good.
void require_on_one_stage(const ModelState& state, const std::vector<at::Tensor>& parameters, const char* call) {
  if (!state.pipeline) return;
  std::set<const void*> wanted;
  for (const at::Tensor& parameter : parameters) wanted.insert(parameter.unsafeGetTensorImpl());
  for (const auto& item : state.module->named_parameters()) {
    const void* const parameter = item.value().unsafeGetTensorImpl();
    if (!wanted.contains(parameter)) continue;
    for (const TiedWeights& tied : state.pipeline->tied) {
      const bool is_tied = std::any_of(tied.parameters.begin(), tied.parameters.end(), [&](const at::Tensor& tensor) {
        return tensor.unsafeGetTensorImpl() == parameter;
      });
      require(
          !is_tied || !tied.ranks || tied.ranks->size() == 1, call, " with ", item.key(),
          ", which is tied: other ranks of the pipeline have copies, which would keep the old values. ",
          "Read it without a modifier rank; change it before initialize(), or load a checkpoint with the new values");
    }
  }
}

void take_over_changes(const ModelState& state, size_t bucket) {
  at::autocast::clear_cache();                 // of this thread: casted copies of the weights before
  if (bucket >= state.buckets.size()) return;  // frozen
  const at::NoGradGuard no_grad;
  at::Tensor own = state.own_part(bucket);
  if (own.is_alias_of(state.masters[bucket])) return;
  state.buckets[bucket].use_slice(/*changes=*/false, [&] {
    state.use_master(bucket, /*changes=*/true, [&](const at::Tensor& master) {
      own = own.to(master.device());
      // What was not changed keeps the precision that only the master has, and what ranks have stepped by themselves.
      const at::Tensor before = state.optimizer.weights(bucket, master);
      at::Tensor(master).copy_(at::where(before.to(own.scalar_type()) == own, master, own.to(master.scalar_type())));
    });
  });
}

zero::GatheredParameters::Scope scope_of_parameters(ModelState& state, const std::vector<at::Tensor>& parameters,
                                                    std::optional<int> modifier_rank) {
  std::set<const void*> wanted;
  for (const at::Tensor& parameter : parameters) wanted.insert(trained_tensor(parameter).unsafeGetTensorImpl());
  if (modifier_rank) require_on_one_stage(state, parameters, "gathered_parameters: expected no modifier rank");
  const auto take = [&](const zero::Parameter& parameter) {
    return wanted.erase(parameter.tensor.unsafeGetTensorImpl()) > 0;
  };
  zero::GatheredParameters::Scope scope;
  const auto add_buckets = [&](std::vector<zero::ParameterBucket>& from, size_t first) {
    for (size_t b = 0; b < from.size(); ++b) {
      const auto& in_bucket = from[b].parameters();
      if (std::count_if(in_bucket.begin(), in_bucket.end(), take) > 0) scope.buckets.emplace_back(first + b, &from[b]);
    }
  };
  add_buckets(state.buckets, 0);
  add_buckets(state.frozen_buckets, state.buckets.size());
  if (!state.gatherer) std::copy_if(state.frozen.begin(), state.frozen.end(), std::back_inserter(scope.others), take);
  require(wanted.empty(), "gathered_parameters: ", wanted.size(), " of ", parameters.size(),
          " tensors are no parameters of the engine's model; expected tensors as model->parameters() has them");
  if (state.tensor) scope.wholes = std::make_unique<SplitScope>(state, parameters, modifier_rank.has_value());
  scope.gatherer = state.gatherer;
  scope.world = state.ranks.part.get();
  scope.modifier_rank = modifier_rank;
  scope.changed = [&state](size_t bucket) { take_over_changes(state, bucket); };
  return scope;
}

}  // namespace ds::engine
