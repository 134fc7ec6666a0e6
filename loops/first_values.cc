#include "loops/first_values.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>

#include <exception>
#include <limits>
#include <string>
#include <utility>

#include "comm/agreement.h"
#include "core/check.h"
#include "core/tensor_check.h"
#include "core/text.h"
#include "loops/own_parts.h"
#include "loops/sharded_model.h"
#include "model/state/whole_state.h"

namespace ds::loops {
namespace {

at::Tensor whole_frozen(const engine::ModelState& unit, size_t bucket) {
  const zero::ParameterBucket& frozen = unit.frozen_buckets[bucket - unit.buckets.size()];
  if (!frozen.sharded()) return frozen.flat();
  at::Tensor whole;
  frozen.kept_slice().use(/*changes=*/false, [&] {
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

size_t count_on_meta(const torch::nn::Module& module) {
  size_t count = 0;
  for (const at::Tensor& parameter : module.parameters()) count += parameter.is_meta() ? 1 : 0;
  for (const at::Tensor& buffer : module.buffers()) count += buffer.is_meta() ? 1 : 0;
  return count;
}

at::Tensor no_values(const zero::Parameter& tensor, c10::Device device) {
  if (!tensor.tensor.is_meta()) return {};
  require(tensor.tensor.is_floating_point(), "fully_shard: buffer ", tensor.name, " is on the meta device: expected ",
          "values for ", describe(tensor.tensor), ", of which none says that it is missing; register the buffer on ",
          device.str(), ", or pass .weights");
  const at::TensorOptions options = tensor.tensor.options().device(device).requires_grad(false);
  return at::full({}, std::numeric_limits<double>::quiet_NaN(), options).expand(tensor.tensor.sizes());
}

void require_values(const ShardedModel& model) {
  const at::NoGradGuard no_grad;
  std::exception_ptr failure;
  const auto look = [&](const std::string& name, const at::Tensor& values) {
    if (failure || !values.is_floating_point() || !values.isnan().any().item<bool>()) return;
    failure = std::make_exception_ptr(UsageError(
        cat("backward(): ", name, " was on the meta device when fully_shard was called: expected values for it since, ",
            "found none. Load them with sharded->load_full_state_dict(), load_sharded_state_dict() or load(), or make ",
            "them in place under NoGradGuard, on every rank alike, between unit->unshard() and unit->reshard()")));
  };
  for (const OwnPart& part : own_parts(model)) look(cat("parameter ", part.name), part.values);
  for (const auto& item : model.state().module->named_buffers()) look(cat("buffer ", item.key()), item.value());
  const int failed = comm::failed_rank(failure, model.ranks().device, *model.ranks().world);
  require(failed < 0, "backward(): rank ", failed, " has slices without values, its message says which");
}

}  // namespace ds::loops
