#include "model/state/parameter_scope.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "comm/agreement.h"
#include "core/check.h"
#include "core/log.h"
#include "core/split/split_tensor.h"
#include "core/split/tensor_part.h"
#include "core/split/whole_in_place.h"
#include "core/tensor_check.h"
#include "core/without_stack.h"
#include "model/stages/tied_weights.h"
#include "model/state/model_state.h"
#include "model/state/tensor_parts.h"
#include "zero/gather/gathered_scope.h"
#include "zero/gather/split_wholes.h"
#include "zero/value_digest.h"

namespace ds::engine {
namespace {

// The parameters among `parameters` that are split over the tensor axis, shown whole in a scope of
// gathered_parameters(). They are in the order of the module, whatever the order of `parameters` is.
class SplitScope final : public zero::SplitWholes {
 public:
  // `state` outlives the scope.
  SplitScope(ModelState& state, const std::vector<at::Tensor>& parameters, bool modifies);

  void show() override;
  std::optional<std::string> changed() const override;
  void share_wholes() override;
  void share_bucket(size_t bucket, const at::Tensor& flat) override;
  void share_other(const at::Tensor& values) override;
  void hide() noexcept override;

 private:
  struct Shown {
    std::string name;
    at::Tensor parameter, leaf;
    std::shared_ptr<const TensorPart> part;  // null: whole, with a gradient that is a sum over the axis
    SplitState split = {};                   // while it is shown whole
    uint64_t digest = 0;                     // for reading
    uint32_t version = 0;
  };
  static at::IntArrayRef sizes_of(const Shown& one);
  // Throws UsageError when the program has given one of them another shape, on any rank. Collective over all ranks.
  void require_shapes() const;

  ModelState& state_;
  bool modifies_;
  std::vector<Shown> all_;
  size_t shown_ = 0;  // how many of them are shown so far
};

SplitScope::SplitScope(ModelState& state, const std::vector<at::Tensor>& parameters, bool modifies)
    : state_(state), modifies_(modifies) {
  for (const TensorParts::SplitParameter& one : state.tensor->parameters) {
    const auto is_same = [&](const at::Tensor& other) { return other.is_same(one.parameter); };
    const bool known =
        std::any_of(all_.begin(), all_.end(), [&](const Shown& other) { return is_same(other.parameter); });
    if (known || std::none_of(parameters.begin(), parameters.end(), is_same)) continue;
    all_.push_back(
        {.name = one.name, .parameter = one.parameter, .leaf = one.leaf, .part = part_of_parameter(one.parameter)});
  }
}

at::IntArrayRef SplitScope::sizes_of(const Shown& one) {
  return one.part ? at::IntArrayRef(one.part->whole_sizes()) : one.leaf.sizes();
}

void SplitScope::show() {
  const at::NoGradGuard no_grad;
  for (Shown& one : all_) {
    const at::Tensor whole = one.part ? state_.tensor->joined(one.leaf.detach(), *one.part) : one.leaf.detach().clone();
    if (!modifies_) one.digest = zero::digest_of(whole);
    one.split = make_whole(one.parameter, whole);
    one.version = one.parameter._version();
    ++shown_;
    ++state_.tensor->shown;
  }
}

std::optional<std::string> SplitScope::changed() const {
  for (size_t i = 0; i < shown_; ++i) {
    const at::Tensor values = all_[i].parameter.detach();
    const bool is_same = values.sizes() == sizes_of(all_[i]) && values.scalar_type() == all_[i].leaf.scalar_type() &&
                         all_[i].parameter._version() == all_[i].version && zero::digest_of(values) == all_[i].digest;
    if (!is_same) return all_[i].name;
  }
  return std::nullopt;
}

void SplitScope::require_shapes() const {
  std::exception_ptr failure;
  try {
    for (size_t i = 0; i < shown_; ++i) {
      const at::Tensor values = all_[i].parameter.detach();
      require(values.sizes() == sizes_of(all_[i]), "gathered parameters: parameter ", all_[i].name,
              ": expected the shape ", sizes_of(all_[i]), " that it had, found ", describe(values));
    }
  } catch (...) {
    failure = std::current_exception();
  }
  const int failed = comm::failed_rank(failure, state_.ranks.device, *state_.ranks.world);
  require(failed < 0, "gathered parameters: rank ", failed,
          " has a parameter of another shape, its message says which");
}

void SplitScope::share_wholes() {
  const at::NoGradGuard no_grad;
  require_shapes();
  for (size_t i = 0; i < shown_; ++i) {
    const Shown& one = all_[i];
    at::Tensor values = one.parameter.detach();
    values = values.to(one.leaf.device(), one.leaf.scalar_type()).contiguous();
    share_other(values);
    one.leaf.detach().copy_(one.part ? slice_of(values, *one.part) : values);
  }
}

void SplitScope::share_bucket(size_t bucket, const at::Tensor& flat) {
  const size_t trained = state_.buckets.size();
  const zero::ParameterBucket& of = bucket < trained ? state_.buckets[bucket] : state_.frozen_buckets[bucket - trained];
  const auto is_part = [](const zero::Parameter& parameter) { return parameter.part != nullptr; };
  if (std::none_of(of.parameters().begin(), of.parameters().end(), is_part)) return share_other(flat);
  ensure(std::all_of(of.parameters().begin(), of.parameters().end(), is_part), "a bucket has parts or wholes");
}

void SplitScope::share_other(const at::Tensor& values) {
  if (state_.tensor->cuts_batches) return;  // the buckets' own exchange reaches the ranks of the axis, too
  if (values.numel() > 0) state_.tensor->ranks->broadcast(values, 0, "changed parameters").wait();
}

void SplitScope::hide() noexcept {
  for (; shown_ > 0; --shown_, --state_.tensor->shown) {
    try {
      split_again(all_[shown_ - 1].parameter, all_[shown_ - 1].split);
    } catch (const std::exception& error) {
      log::error("gathered parameters: ", all_[shown_ - 1].name, ": ", without_stack(error.what()));
    }
  }
}

}  // namespace

void require_on_one_stage(const ModelState& state, const std::vector<at::Tensor>& parameters, const char* call) {
  if (state.pipeline_ranks() == 1) return;
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

void take_over_changes(ModelState& state, size_t bucket) {
  at::autocast::clear_cache();                 // of this thread: casted copies of the weights before
  if (bucket >= state.buckets.size()) return;  // frozen
  const at::NoGradGuard no_grad;
  const at::Tensor part = state.own_part(bucket);
  if (part.is_alias_of(state.masters[bucket])) return;
  state.buckets[bucket].kept_slice().use(/*changes=*/false, [&] {
    state.use_master(bucket, /*changes=*/true, [&](const at::Tensor& master) {
      const at::Tensor own = part.to(master.device());
      // Unchanged values keep the precision that only the master has, and what ranks have stepped by themselves.
      const at::Tensor shown = state.optimizer.weights(bucket, master).to(own.scalar_type());
      const at::Tensor unchanged = shown == own;
      at::Tensor taken = own.to(master.scalar_type());
      bool all_restored = false;
      if (const auto found = state.overwritten.find(bucket); found != state.overwritten.end()) {
        const OverwrittenMaster& before = found->second;
        const at::Tensor restored = before.shown.to(own.device()) == own;
        taken = at::where(restored, before.master.to(own.device()), taken);
        all_restored = restored.all().item<bool>();
      } else if (master.scalar_type() != own.scalar_type() && !unchanged.all().item<bool>()) {
        state.overwritten[bucket] = {.master = master.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true),
                                     .shown = shown.to(at::kCPU)};
      }
      at::Tensor(master).copy_(at::where(unchanged, master, taken));
      if (all_restored) state.overwritten.erase(bucket);
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
  const auto frozen = state.frozen_outside_buckets();
  std::copy_if(frozen.begin(), frozen.end(), std::back_inserter(scope.others), take);
  require(wanted.empty(), "gathered_parameters: ", wanted.size(), " of ", parameters.size(),
          " tensors are no parameters of the engine's model; expected tensors as model->parameters() has them");
  if (state.tensor) scope.wholes = std::make_unique<SplitScope>(state, parameters, modifier_rank.has_value());
  if (state.gatherer) scope.held = &state.gatherer->held();
  scope.world = state.ranks.part.get();
  scope.modifier_rank = modifier_rank;
  scope.changed = [&state](size_t bucket) { take_over_changes(state, bucket); };
  return scope;
}

}  // namespace ds::engine
