#include "dsengine/fully_shard.h"

#include <utility>

#include "core/check.h"
#include "loops/optimizer_states.h"
#include "loops/shard_unit.h"
#include "loops/sharded_state.h"

namespace ds {

std::shared_ptr<FullySharded> fully_shard(const std::shared_ptr<torch::nn::Module>& module,
                                          const FullyShardOptions& options) {
  return std::make_shared<FullySharded>(loops::ShardUnit::make(module, options));
}

FullySharded::FullySharded(std::shared_ptr<loops::ShardUnit> unit) : unit_(std::move(unit)) {}

FullySharded::~FullySharded() { unit_->dropped(); }

StateDict FullySharded::named_parameters() const {
  loops::ShardedModel& model = unit_->model_in_pass("parameters");
  unit_->note_use();
  std::vector<char> own(model.state().buckets.size(), 0);
  for (const size_t bucket : unit_->buckets("parameters")) {
    if (bucket < own.size()) own[bucket] = 1;
  }
  StateDict parameters;
  for (const loops::SliceLeaf& leaf : model.leaves()) {
    if (own[leaf.bucket]) parameters.emplace_back(leaf.name, leaf.tensor);
  }
  return parameters;
}

std::vector<at::Tensor> FullySharded::parameters() const {
  std::vector<at::Tensor> result;
  for (auto& [name, parameter] : named_parameters()) result.push_back(std::move(parameter));
  return result;
}

void FullySharded::unshard() { unit_->model("unshard").unshard(unit_->buckets("unshard")); }

void FullySharded::reshard() { unit_->model("reshard").reshard(unit_->buckets("reshard")); }

void FullySharded::set_requires_gradient_sync(bool requires_gradient_sync) {
  unit_->model("set_requires_gradient_sync").set_gradient_sync(requires_gradient_sync);
}

void FullySharded::set_reshard_after_backward(bool reshard_after_backward) {
  constexpr const char* kCall = "set_reshard_after_backward";
  unit_->model(kCall).set_reshard_after_backward(unit_->buckets(kCall), reshard_after_backward);
}

void FullySharded::set_reshard_after_forward(bool reshard_after_forward) {
  constexpr const char* kCall = "set_reshard_after_forward";
  unit_->model(kCall).set_reshard_after_forward(unit_->buckets(kCall), reshard_after_forward);
}

namespace {

std::vector<size_t> buckets_of(const loops::ShardUnit& of, const std::vector<loops::ShardUnit*>& units,
                               const char* call) {
  std::vector<size_t> buckets;
  for (const loops::ShardUnit* unit : units) {
    require(&unit->model_in_pass(call) == &of.model_in_pass(call), call, ": expected units of the same model, found ",
            unit->module().name(), " of another one");
    for (const size_t bucket : unit->buckets(call)) buckets.push_back(bucket);
  }
  return buckets;
}

}  // namespace

void FullySharded::set_modules_to_forward_prefetch(const std::vector<std::shared_ptr<FullySharded>>& units) {
  prefetch(units, /*in_backward=*/false, "set_modules_to_forward_prefetch");
}

void FullySharded::set_modules_to_backward_prefetch(const std::vector<std::shared_ptr<FullySharded>>& units) {
  prefetch(units, /*in_backward=*/true, "set_modules_to_backward_prefetch");
}

void FullySharded::prefetch(const std::vector<std::shared_ptr<FullySharded>>& units, bool in_backward,
                            const char* call) {
  std::vector<loops::ShardUnit*> chosen;
  for (const auto& unit : units) chosen.push_back(unit->unit_.get());
  unit_->model(call).prefetch(unit_->buckets(call), buckets_of(*unit_, chosen, call), in_backward);
}

double FullySharded::clip_grad_norm_(double max_norm, double norm_type) {
  return loops::clip_gradients(unit_->use("clip_grad_norm_"), max_norm, norm_type);
}

StateDict FullySharded::full_state_dict(const FullStateOptions& options) const {
  return loops::full_state(unit_->use("full_state_dict"), options);
}

void FullySharded::load_full_state_dict(const StateDict& state, bool broadcast_from_rank0) {
  loops::load_full_state(unit_->use("load_full_state_dict"), state, broadcast_from_rank0);
}

std::vector<ShardedTensor> FullySharded::sharded_state_dict() const {
  return loops::sharded_state(unit_->use("sharded_state_dict"));
}

void FullySharded::load_sharded_state_dict(const std::vector<ShardedTensor>& parts) {
  loops::load_sharded_state(unit_->use("load_sharded_state_dict"), parts);
}

StateDict FullySharded::local_state_dict() const { return loops::local_state(unit_->use("local_state_dict")); }

void FullySharded::load_local_state_dict(const StateDict& state) {
  loops::load_local_state(unit_->use("load_local_state_dict"), state);
}

std::string FullySharded::save(const std::string& folder, const std::string& tag) const {
  return loops::save_state(unit_->use("save"), folder, tag, nullptr);
}

void FullySharded::load(const std::string& folder, const std::string& tag) {
  loops::load_state(unit_->use("load"), folder, tag, nullptr);
}

std::string FullySharded::save(const std::string& folder, const std::string& tag,
                               torch::optim::Optimizer& optimizer) const {
  return loops::save_state(unit_->use("save"), folder, tag, &optimizer);
}

void FullySharded::load(const std::string& folder, const std::string& tag, torch::optim::Optimizer& optimizer) {
  loops::load_state(unit_->use("load"), folder, tag, &optimizer);
}

StateDict FullySharded::full_optim_state_dict(torch::optim::Optimizer& optimizer,
                                              const FullStateOptions& options) const {
  constexpr const char* kCall = "full_optim_state_dict";
  return loops::full_optimizer_state({unit_->use(kCall), optimizer, kCall}, options);
}

void FullySharded::load_full_optim_state_dict(torch::optim::Optimizer& optimizer, const StateDict& state,
                                              bool broadcast_from_rank0) {
  constexpr const char* kCall = "load_full_optim_state_dict";
  loops::load_full_optimizer_state({unit_->use(kCall), optimizer, kCall}, state, broadcast_from_rank0);
}

std::vector<ShardedTensor> FullySharded::sharded_optim_state_dict(torch::optim::Optimizer& optimizer) const {
  constexpr const char* kCall = "sharded_optim_state_dict";
  return loops::sharded_optimizer_state({unit_->use(kCall), optimizer, kCall});
}

void FullySharded::load_sharded_optim_state_dict(torch::optim::Optimizer& optimizer,
                                                 const std::vector<ShardedTensor>& parts) {
  constexpr const char* kCall = "load_sharded_optim_state_dict";
  loops::load_sharded_optimizer_state({unit_->use(kCall), optimizer, kCall}, parts);
}

zero::HeldBytes FullySharded::held_bytes() const { return unit_->model_in_pass("held_bytes").held_bytes(); }

at::Tensor FullySharded::input_of_policy(const at::Tensor& input) const {
  const MixedPrecisionPolicy& policy = unit_->model_in_pass("forward").options().mp_policy;
  unit_->note_use();
  if (!policy.cast_forward_inputs || !policy.param_dtype || !input.defined() || !input.is_floating_point())
    return input;
  return input.to(*policy.param_dtype);
}

at::Tensor FullySharded::output_of_policy(const at::Tensor& output) const {
  const auto& dtype = unit_->model_in_pass("forward").options().mp_policy.output_dtype;
  return dtype && output.defined() && output.is_floating_point() ? output.to(*dtype) : output;
}

void FullySharded::require_no_output_dtype() const {
  require(
      !unit_->model_in_pass("forward").options().mp_policy.output_dtype,
      "forward: mp_policy.output_dtype: expected a module that returns one tensor, found another type; cast what it "
      "returns in the program, and leave the option out");
}

}  // namespace ds
