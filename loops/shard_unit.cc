#include "loops/shard_unit.h"

#include <utility>

#include "core/check.h"

namespace ds::loops {
namespace {

struct Listed {
  std::weak_ptr<ShardUnit> unit;
  std::shared_ptr<ShardUnit> kept;  // see the note in the header
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

std::string named(const torch::nn::Module& module) { return cat("a ", module.name()); }

// What of a unit's options has to be that of the module around it.
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
  std::vector<ShardPart> parts;
  EarlierUnits earlier;
  for (const std::shared_ptr<ShardUnit>& unit : inner) {
    if (unit->own_) {
      unit->own_->end_as_unit();
      earlier.add(std::move(unit->own_));
    }
    parts.push_back({unit->module_, reshards_after_forward(unit->options_)});
  }
  auto unit = std::make_shared<ShardUnit>(module, options);
  unit->own_ = std::make_shared<ShardedModel>(module, options, parts, earlier);
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

ShardedModel& ShardUnit::model(const char* call) const {
  ShardedModel& model = model_in_pass(call);
  model.require_between_passes(call);
  return model;
}

}  // namespace ds::loops
