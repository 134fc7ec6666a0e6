#include "loops/shard_layout.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>

#include <limits>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "core/memory/storage_memory.h"
#include "core/tensor_check.h"
#include "model/state/tensor_parts.h"
#include "optim/chunked_update.h"

namespace ds::loops {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max() / 4;
constexpr int64_t kOneAhead = 1;  // another gather begins while less than this is on its way

engine::config::DType config_dtype(at::ScalarType dtype) {
  if (dtype == at::kBFloat16) return engine::config::DType::kBFloat16;
  if (dtype == at::kHalf) return engine::config::DType::kFloat16;
  return dtype == at::kDouble ? engine::config::DType::kFloat64 : engine::config::DType::kFloat32;
}

void require_floating(const char* field, const std::optional<at::ScalarType>& dtype) {
  require<ConfigError>(!dtype || *dtype == at::kFloat || *dtype == at::kBFloat16 || *dtype == at::kHalf,
                       "fully_shard: ", field, ": expected float32, bfloat16 or float16, found ",
                       dtype ? c10::toString(*dtype) : "nothing");
}

// One for all parameters: buckets have one, and the model runs in it.
at::ScalarType dtype_of(const engine::ModelParameters& parameters, const MixedPrecisionPolicy& policy) {
  const zero::Parameter& first =
      parameters.trainable.empty() ? parameters.frozen.front() : parameters.trainable.front();
  const at::ScalarType dtype = first.tensor.scalar_type();
  for (const auto* list : {&parameters.trainable, &parameters.frozen}) {
    for (const zero::Parameter& parameter : *list) {
      require<ConfigError>(policy.param_dtype || parameter.tensor.scalar_type() == dtype, "fully_shard: parameter ",
                           parameter.name, ": expected ", dtype, " as parameter ", first.name, " has it, found ",
                           describe(parameter.tensor), "; name one in mp_policy.param_dtype, or convert the module");
      require<ConfigError>(!policy.param_dtype || parameter.tensor.scalar_type() != at::kDouble,
                           "fully_shard: mp_policy.param_dtype: expected none for the float64 parameter ",
                           parameter.name, ", whose precision it would lose; convert the module to float32 first");
    }
  }
  return dtype;
}

// A unit's number and, of its parameters that are split over a tensor axis, that and the count of all.
void choose_parts(const engine::ModelParameters& parameters, const std::vector<LayoutUnit>& units,
                  engine::BucketOptions& options) {
  std::unordered_map<const void*, int> part_of;
  const int rest = static_cast<int>(units.size());
  const int count = rest + 1;
  for (int p = 0; p < rest; ++p) {
    options.shared_parts.insert(options.shared_parts.end(), {p, p + count});
    for (const at::Tensor& parameter : units[static_cast<size_t>(p)].module->parameters()) {
      part_of.emplace(engine::trained_tensor(parameter).unsafeGetTensorImpl(), p);
    }
  }
  for (const zero::Parameter& parameter : parameters.trainable) {
    const auto found = part_of.find(parameter.tensor.unsafeGetTensorImpl());
    options.parts.push_back((found == part_of.end() ? rest : found->second) + (parameter.part ? count : 0));
  }
}

// A slice is its own master where dtype and memory are the same.
std::shared_ptr<SliceStore> store_of(const at::Tensor& master, bool to_host, bool pinned) {
  if (!master.defined()) return to_host ? std::make_shared<HostSlices>(pinned) : nullptr;
  if (to_host) {
    const at::Tensor host = at::empty(master.sizes(), master.options().device(at::kCPU).pinned_memory(pinned));
    host.copy_(master);
    master.set_data(host);
  }
  return std::make_shared<CastSlices>(master);
}

engine::Plan plan_of(const ShardRanks& ranks, at::ScalarType dtype, at::ScalarType reduce_dtype, bool limit_gathers) {
  engine::Plan plan;
  plan.topology = {
      .world_size = ranks.world->size(), .dp = ranks.all->size(), .tensor = ranks.tensor ? ranks.tensor->size() : 1};
  plan.model_dtype = config_dtype(dtype);
  plan.gradient_dtype = plan.communication_dtype = config_dtype(reduce_dtype);
  plan.master_dtype = plan.state_dtype = config_dtype(optimizers::state_type(dtype));
  plan.separate_master = plan.master_dtype != plan.model_dtype;
  plan.gradient_policy = zero::ReductionPolicy::kReduceScatterEveryBackward;
  plan.partition_optimizer = true;
  plan.shard_ranks = ranks.shards->size();
  zero::GatherLimits limits;
  limits.max_live = kNoLimit;
  limits.max_reuse_distance = 0;
  if (limit_gathers) limits.prefetch = kOneAhead;
  plan.gather = limits;
  return plan;
}

}  // namespace

std::optional<bool> reshards_after_forward(const FullyShardOptions& options) {
  if (!options.sharding_strategy) return options.reshard_after_forward;
  return *options.sharding_strategy != ShardingStrategy::kShardGradOp;
}

ShardLayout shard_layout(const engine::ModelParameters& parameters, const std::vector<LayoutUnit>& units,
                         const FullyShardOptions& options, const ShardRanks& ranks) {
  const MixedPrecisionPolicy& policy = options.mp_policy;
  require_floating("mp_policy.param_dtype", policy.param_dtype);
  require_floating("mp_policy.reduce_dtype", policy.reduce_dtype);
  ShardLayout layout;
  const at::ScalarType dtype_before = dtype_of(parameters, policy);
  const at::ScalarType dtype = policy.param_dtype.value_or(dtype_before);
  layout.reduce_dtype = policy.reduce_dtype.value_or(dtype);
  layout.plan = plan_of(ranks, dtype, layout.reduce_dtype, options.limit_all_gathers);
  const bool to_host = options.offload_policy && !ranks.device.is_cpu();
  require<ConfigError>(
      options.sharding_strategy != ShardingStrategy::kNoShard || (!layout.plan.separate_master && !to_host),
      "fully_shard: NO_SHARD: expected float32 parameters on the device, found ", dtype,
      to_host ? " and .offload_policy" : "", "; use FULL_SHARD, or a mesh with copies along its first axis");
  const bool pinned = to_host && options.offload_policy->pin_memory;
  layout.buckets = {.max_bucket_elements = kNoLimit,
                    .dtype = dtype,
                    .master_dtype = optimizers::state_type(dtype),
                    .partition = true,
                    .shard = ranks.shards->size() > 1 || layout.plan.separate_master || to_host,
                    .persistent_numel = -1};
  layout.buckets.store_of = [to_host, pinned](const at::Tensor& master) { return store_of(master, to_host, pinned); };
  choose_parts(parameters, units, layout.buckets);
  const std::optional<bool> of_all = reshards_after_forward(options);
  for (const LayoutUnit& unit : units) {
    layout.reshards_after_forward.push_back(unit.reshard_after_forward.value_or(of_all.value_or(true)) ? 1 : 0);
  }
  layout.reshards_after_forward.push_back(of_all.value_or(units.empty()) ? 1 : 0);
  const std::vector<char> once = layout.reshards_after_forward;  // and of what is split over a tensor axis
  layout.reshards_after_forward.insert(layout.reshards_after_forward.end(), once.begin(), once.end());
  return layout;
}

std::string settings_text(const FullyShardOptions& options, size_t units, size_t without_values) {
  const auto text_of = [](const std::optional<at::ScalarType>& dtype) {
    return dtype ? c10::toString(*dtype) : "none";
  };
  const std::optional<bool> reshards = reshards_after_forward(options);
  return cat("fully_shard units\t", units, "\nfully_shard tensors on the meta device\t", without_values,
             "\nfully_shard .mp_policy.param_dtype\t", text_of(options.mp_policy.param_dtype),
             "\nfully_shard .mp_policy.reduce_dtype\t", text_of(options.mp_policy.reduce_dtype),
             "\nfully_shard .reshard_after_forward\t", reshards ? (*reshards ? "true" : "false") : "not said",
             "\nfully_shard .sharding_strategy\t",
             options.sharding_strategy ? static_cast<int>(*options.sharding_strategy) : -1,
             "\nfully_shard .backward_prefetch\t", static_cast<int>(options.backward_prefetch),
             "\nfully_shard .limit_all_gathers\t", options.limit_all_gathers ? "true" : "false", "\n");
}

at::Tensor CastSlices::allocate(int64_t numel, at::ScalarType dtype) {
  uses_ = 1;
  return at::empty({numel}, master_.options().dtype(dtype));
}

void CastSlices::load(const at::Tensor& slice) {
  if (uses_++ > 0) return;
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard not_intercepted(/*is_enabled=*/false);
  const size_t bytes = static_cast<size_t>(slice.numel()) * slice.element_size();
  give_storage(slice, c10::GetAllocator(slice.device().type())->allocate(bytes), bytes);
  at::Tensor(slice).copy_(master_);
}

void CastSlices::unload(const at::Tensor& slice, bool changed) {
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard not_intercepted(/*is_enabled=*/false);
  if (changed && made_) {
    const at::Tensor stays = master_.to(slice.scalar_type()).eq(slice);
    master_.copy_(at::where(stays, master_, slice.to(master_.scalar_type())));
  }
  made_ = true;
  if (--uses_ == 0) take_storage(slice);
}

at::Tensor HostSlices::allocate(int64_t numel, at::ScalarType dtype) {
  return at::empty({numel}, at::TensorOptions().dtype(dtype).pinned_memory(pinned_));
}

}  // namespace ds::loops
