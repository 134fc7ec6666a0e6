#include "dsengine/fully_shard.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/making_process.h"
#include "loops/optimizer_states.h"
#include "loops/sharded_model.h"
#include "loops/sharded_state.h"

namespace ds::loops {

// Note [Who keeps a sharded module]
// fully_shard() shards at once, so that a module is sharded whatever comes next. Where a module around it follows, the
// inner ones end, and their slices are taken over, bucket by bucket, into that one's layout as its units. A unit's
// result is usually dropped, as in FSDP2's tutorial: until a module around it follows, or somebody has used the result,
// the list of this thread keeps it. The outermost one is kept by its result, which has been used (somebody has taken
// its parameters or its state, or has run it through the result).

// A module of this thread that is sharded, by itself or as a unit of one around it.
class ShardUnit {
 public:
  // Shards the module. Throws as ds::fully_shard().
  static std::shared_ptr<ShardUnit> make(const std::shared_ptr<torch::nn::Module>& module,
                                         const FullyShardOptions& options);
  ShardUnit(std::shared_ptr<torch::nn::Module> module, FullyShardOptions options)
      : module_(std::move(module)), options_(std::move(options)) {}

  const torch::nn::Module& module() const { return *module_; }
  // The sharded model that the unit is a part of. Throw UsageError, as `call`, where it has ended; model() also while a
  // pass runs.
  ShardedModel& model_in_pass(const char* call) const;
  ShardedModel& model(const char* call) const;
  // The buckets that have parameters of the unit.
  std::vector<size_t> buckets(const char* call) const;
  const FullyShardOptions& options() const { return options_; }
  // Notes that the program has slices or the state of the unit, or runs it.
  void note_use() { used_ = true; }
  ShardedModel& use(const char* call) {
    ShardedModel& used = model(call);
    note_use();
    return used;
  }
  // Called when what fully_shard() returned for the unit has gone.
  void dropped() const;

 private:
  void unlist() const;

  std::shared_ptr<torch::nn::Module> module_;
  FullyShardOptions options_;
  std::shared_ptr<ShardedModel> own_;              // null: it is part of another one
  std::weak_ptr<ShardedModel> outer_;              // the model of that one
  std::vector<std::shared_ptr<ShardUnit>> inner_;  // in the order of their calls
  bool used_ = false;
};

namespace {

struct Listed {
  std::weak_ptr<ShardUnit> unit;
  std::shared_ptr<ShardUnit> kept;  // see the note above
};

std::vector<Listed>& listed() {
  thread_local std::vector<Listed> units;
  return units;
}

std::vector<std::shared_ptr<ShardUnit>> living() {
  std::erase_if(listed(), [](const Listed& one) { return one.unit.expired(); });
  std::vector<std::shared_ptr<ShardUnit>> units;
  for (const Listed& one : listed()) units.push_back(one.unit.lock());
  return units;
}

bool is_inside(const torch::nn::Module& inner, const torch::nn::Module& outer) {
  if (&inner == &outer) return false;
  bool found = false;
  outer.apply([&](const torch::nn::Module& module) { found = found || &module == &inner; });
  return found;
}

// Returns the buckets of a sharded model with parameters of a module; all of them for the outermost one. Frozen ones
// come last.
std::vector<size_t> buckets_with(const engine::ModelState& state, const torch::nn::Module& module) {
  std::vector<size_t> buckets;
  std::unordered_set<const void*> own;
  for (const at::Tensor& parameter : module.parameters()) {
    own.insert(engine::trained_tensor(parameter).unsafeGetTensorImpl());
  }
  const auto look = [&](const zero::ParameterBucket& bucket, size_t number) {
    const auto& parameters = bucket.parameters();
    const bool any = std::any_of(parameters.begin(), parameters.end(), [&](const zero::Parameter& parameter) {
      return own.contains(parameter.tensor.unsafeGetTensorImpl());
    });
    if (any) buckets.push_back(number);
  };
  for (size_t b = 0; b < state.buckets.size(); ++b) look(state.buckets[b], b);
  for (size_t f = 0; f < state.frozen_buckets.size(); ++f) look(state.frozen_buckets[f], state.buckets.size() + f);
  return buckets;
}

std::string named(const torch::nn::Module& module) { return cat("a ", module.name()); }

// Throws ConfigError where options of a unit differ that have to be those of the module around it.
void require_same_policy(const FullyShardOptions& unit, const FullyShardOptions& outer,
                         const torch::nn::Module& module) {
  const MixedPrecisionPolicy& own = unit.mp_policy;
  const MixedPrecisionPolicy& of_outer = outer.mp_policy;
  const std::string where = cat("fully_shard: the unit ", named(module), ": ");
  require<ConfigError>(
      !own.param_dtype || own.param_dtype == of_outer.param_dtype, where,
      "mp_policy.param_dtype: expected that of the module around it: all of a model runs in one dtype. "
      "Give both the same, or leave the unit's out");
  require<ConfigError>(!own.reduce_dtype || own.reduce_dtype == of_outer.reduce_dtype, where,
                       "mp_policy.reduce_dtype: expected that of the module around it; give both the same");
  require<ConfigError>(!own.output_dtype || own.output_dtype == of_outer.output_dtype, where,
                       "mp_policy.output_dtype: LibTorch modules have no hooks that could cast what a unit's forward() "
                       "returns; cast it in the module, or leave it out");
  require<ConfigError>(!unit.offload_policy || outer.offload_policy, where,
                       ".offload_policy: expected none, as of the module around it: all slices live in one place");
}

}  // namespace

std::shared_ptr<ShardUnit> ShardUnit::make(const std::shared_ptr<torch::nn::Module>& module,
                                           const FullyShardOptions& options) {
  require(module != nullptr, "fully_shard: expected a module, found none");
  std::vector<std::shared_ptr<ShardUnit>> inner;
  for (const std::shared_ptr<ShardUnit>& other : living()) {
    require(other->module_ != module, "fully_shard: ", named(*module),
            " is sharded already; expected one call for each "
            "module. What the first one returned has its slices");
    require(
        !is_inside(*module, *other->module_), "fully_shard: ", named(*module), " is inside of ", named(*other->module_),
        ", which is sharded; expected calls from the inside to the outside. Shard it before ", "the module around it");
    if (!is_inside(*other->module_, *module)) continue;
    require_same_policy(other->options_, options, *other->module_);
    inner.push_back(other);
  }
  std::vector<LayoutUnit> units;
  EarlierUnits earlier;
  for (const std::shared_ptr<ShardUnit>& unit : inner) {
    if (unit->own_) {
      unit->own_->end_as_unit();
      earlier.add(std::move(unit->own_));
    }
    units.push_back({unit->module_, reshards_after_forward(unit->options_)});
  }
  auto unit = std::make_shared<ShardUnit>(module, options);
  unit->own_ = make_shared_where_made<ShardedModel>(module, options, units, earlier);
  for (const std::shared_ptr<ShardUnit>& one : inner) {
    one->outer_ = unit->own_;
    one->inner_.clear();
    one->unlist();
  }
  unit->inner_ = std::move(inner);
  listed().push_back({unit, unit});
  return unit;
}

void ShardUnit::unlist() const {
  for (Listed& one : listed()) {
    if (one.kept.get() != this) continue;
    const std::shared_ptr<ShardUnit> last = std::move(one.kept);  // ends outside of the list
    return;
  }
}

void ShardUnit::dropped() const {
  if (used_) unlist();
}

ShardedModel& ShardUnit::model_in_pass(const char* call) const {
  const std::shared_ptr<ShardedModel> model = own_ ? own_ : outer_.lock();
  require(model != nullptr, call, ": ", named(*module_), " is sharded no more: what fully_shard() returned for the ",
          "module around it has gone; keep it as long as the module is used");
  return *model;
}

std::vector<size_t> ShardUnit::buckets(const char* call) const {
  return buckets_with(model_in_pass(call).state(), *module_);
}

ShardedModel& ShardUnit::model(const char* call) const {
  ShardedModel& model = model_in_pass(call);
  model.require_between_passes(call);
  return model;
}

}  // namespace ds::loops

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

void FullySharded::unshard() { unit_->model("unshard").gathers().unshard(unit_->buckets("unshard")); }

void FullySharded::reshard() { unit_->model("reshard").gathers().reshard(unit_->buckets("reshard")); }

void FullySharded::set_requires_gradient_sync(bool requires_gradient_sync) {
  unit_->model("set_requires_gradient_sync").set_gradient_sync(requires_gradient_sync);
}

void FullySharded::set_reshard_after_backward(bool reshard_after_backward) {
  constexpr const char* kCall = "set_reshard_after_backward";
  unit_->model(kCall).gathers().set_reshard_after_backward(unit_->buckets(kCall), reshard_after_backward);
}

void FullySharded::set_reshard_after_forward(bool reshard_after_forward) {
  constexpr const char* kCall = "set_reshard_after_forward";
  unit_->model(kCall).gathers().set_reshard_after_forward(unit_->buckets(kCall), reshard_after_forward);
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
  unit_->model(call).gathers().prefetch(unit_->buckets(call), buckets_of(*unit_, chosen, call), in_backward);
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

zero::HeldBytes FullySharded::held_bytes() const { return loops::held_bytes(unit_->model_in_pass("held_bytes")); }

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
