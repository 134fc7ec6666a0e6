#include <algorithm>

#include "config/plan/plan_choices.h"
#include "core/check.h"
#include "optim/optimizer_table.h"

namespace ds::engine {
namespace {

using config::DsConfig;

zero::Home home_of(config::OffloadDevice device) {
  switch (device) {
    case config::OffloadDevice::kCpu:
      return zero::Home::kHost;
    case config::OffloadDevice::kNvme:
      return zero::Home::kFile;
    case config::OffloadDevice::kNone:
      break;
  }
  return zero::Home::kDevice;
}

// Whether an update exchanges nothing with other ranks. Optimizers that compress pass: choose_compressed_optimizer()
// says what they exclude.
bool updates_elementwise(const DsConfig& config, const PlanFacts& facts) {
  const optimizers::OptimizerDescription* const row = optimizers::find_optimizer(config.optimizer.type);
  return facts.client_optimizer || row == nullptr || row->elementwise || row->compresses;
}

// Names what to use in place of an optimizer that talks to other ranks during its update.
std::string elementwise_names() { return optimizers::optimizer_names(optimizers::updates_alone); }

}  // namespace

void choose_offload(const DsConfig& config, const PlanFacts& facts, Plan& plan) {
  const config::ZeroSection& zero = config.zero_optimization;
  plan.offload.staged = facts.accelerator;
  if (zero.stage > 0 && zero.offload_optimizer && facts.trains) {
    plan.offload.optimizer = home_of(zero.offload_optimizer->device);
    plan.offload.ratio = zero.offload_optimizer->ratio;
    plan.offload.delayed = zero.offload_optimizer->delayed_update;
    require<ConfigError>(
        !plan.offload.delayed || plan.offload.optimizer != zero::Home::kDevice,
        "zero_optimization.offload_optimizer.delayed_update: true needs ",
        "zero_optimization.offload_optimizer.device \"cpu\" or \"nvme\", found \"none\": it delays the ",
        "update on the host; set the device, or remove delayed_update");
    plan.delayed_update_start = zero.offload_optimizer->delayed_update_start;
    require<ConfigError>(!plan.offload.delayed || updates_elementwise(config, facts),
                         "zero_optimization.offload_optimizer.delayed_update: expected false with the optimizer ",
                         config.optimizer.type, ", whose update talks to other ranks while these reduce gradients; ",
                         "use ", elementwise_names(), ", or turn it off");
    // Such an optimizer sends from where its states are, and the ranks of accelerators talk between devices.
    require<ConfigError>(!facts.accelerator || plan.offload.optimizer == zero::Home::kDevice ||
                             plan.shard_ranks * plan.topology.tensor == 1 || updates_elementwise(config, facts),
                         "zero_optimization.offload_optimizer.device: expected \"none\" with the optimizer ",
                         config.optimizer.type, " on ", plan.shard_ranks, " ranks with accelerators, found \"",
                         name_of(zero.optimizer_device()), "\": its update talks to other ranks about tensors that ",
                         "would be in host memory; use ", elementwise_names(), ", or turn offload_optimizer off");
    // buffer_count counts tensors, as DeepSpeed's does: master, gradient and states of a slice.
    const int64_t tensors = 2 + optimizers::state_tensors_of(config.optimizer.type, config.optimizer.values);
    const int64_t overlapping =
        1 + (zero.offload_optimizer->pipeline_read ? 1 : 0) + (zero.offload_optimizer->pipeline_write ? 1 : 0);
    plan.offload.optimizer_buffers = std::max(overlapping, zero.offload_optimizer->buffer_count / tensors);
  }
  if (zero.stage == 3 && zero.offload_param) {
    constexpr int64_t kFewestBuffers = 2;  // one is read while the other is written
    plan.offload.parameters = home_of(zero.param_device());
    plan.offload.parameter_buffers = std::max(kFewestBuffers, zero.offload_param->buffer_count);
    plan.offload.kept_parameters = zero.offload_param->max_in_cpu;
  }
}

void choose_speculation(const DsConfig& config, const PlanFacts& facts, Plan& plan) {
  const config::ZeroSection& zero = config.zero_optimization;
  if (!zero.offload_optimizer || !zero.offload_optimizer->super_offload) return;
  constexpr const char* kKey = "zero_optimization.offload_optimizer.super_offload: true needs ";
  require<ConfigError>(zero.stage > 0, kKey, "zero_optimization.stage 1, 2 or 3, found ", zero.stage,
                       ", where the optimizer is not offloaded; raise the stage, or remove the key");
  require<ConfigError>(plan.offload.optimizer == zero::Home::kHost, kKey,
                       "zero_optimization.offload_optimizer.device \"cpu\", found \"", name_of(zero.optimizer_device()),
                       "\": it updates in host memory, and keeps a copy there to go back to; set it to \"cpu\", or ",
                       "remove super_offload");
  require<ConfigError>(!zero.offload_optimizer->delayed_update, kKey,
                       "zero_optimization.offload_optimizer.delayed_update false, found true: one begins the update ",
                       "before backward ends, the other after the step; keep one of them");
  require<ConfigError>(updates_elementwise(config, facts), kKey, "an optimizer that updates each element by ",
                       "itself, found optimizer.type ", config.optimizer.type, ", whose update talks to other ranks ",
                       "while these reduce gradients; use ", elementwise_names(), ", or remove the key");
  require<ConfigError>(plan.shard_ranks == plan.topology.dp, kKey, "gradients that are complete when they arrive on ",
                       "the host, found zero_optimization.mics_shard_size: ", plan.shard_ranks, " of ",
                       plan.topology.dp, " ranks, where copies of the model join theirs after backward; remove one of ",
                       "the two keys");
  plan.offload.speculative = true;
  const optimizers::OptimizerDescription* const row = optimizers::find_optimizer(config.optimizer.type);
  plan.offload.speculation_copies_gradient = plan.clip_value > 0 || (row != nullptr && !row->preserves_gradient);
}

}  // namespace ds::engine
