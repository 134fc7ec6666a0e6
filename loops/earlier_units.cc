#include "loops/earlier_units.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "core/text.h"
#include "loops/sharded_model.h"
#include "model/state/whole_state.h"

namespace ds::loops {
namespace {

at::Tensor whole_frozen(const engine::ModelState& unit, size_t bucket) {
  const zero::ParameterBucket& frozen = unit.frozen_buckets[bucket - unit.buckets.size()];
  if (!frozen.sharded()) return frozen.flat();
  at::Tensor whole;
  frozen.use_slice(/*changes=*/false, [&] {
    const at::Tensor own = frozen.slice(unit.groups_of(bucket).shards.rank());
    whole = engine::joined_slices(unit, bucket, own, cat("frozen bucket ", bucket));
  });
  return whole;
}

}  // namespace

void EarlierUnits::add(std::shared_ptr<ShardedModel> unit) {
  const engine::ModelState& state = unit->state();
  for (size_t b = 0; b < state.buckets.size(); ++b) note(state, b, state.buckets[b]);
  for (size_t f = 0; f < state.frozen_buckets.size(); ++f) {
    note(state, state.buckets.size() + f, state.frozen_buckets[f]);
  }
  await_values_ = await_values_ || unit->awaits_values();
  units_.push_back(std::move(unit));
}

void EarlierUnits::note(const engine::ModelState& unit, size_t bucket, const zero::ParameterBucket& of) {
  for (size_t i = 0; i < of.parameters().size(); ++i) {
    places_.emplace(of.parameters()[i].tensor.unsafeGetTensorImpl(), Place{&unit, bucket, of.layout().segments[i]});
  }
}

at::Tensor EarlierUnits::value_of(const at::Tensor& parameter) {
  const auto found = places_.find(parameter.unsafeGetTensorImpl());
  if (found == places_.end()) return {};
  const at::NoGradGuard no_grad;
  const auto& [unit, bucket, segment] = found->second;
  if (whole_unit_ != unit || whole_bucket_ != bucket) {
    whole_.reset();
    whole_ = bucket < unit->buckets.size() ? engine::whole_master(*unit, bucket) : whole_frozen(*unit, bucket);
    whole_unit_ = unit;
    whole_bucket_ = bucket;
  }
  return zero::view_of(whole_, segment, parameter);
}

}  // namespace ds::loops
