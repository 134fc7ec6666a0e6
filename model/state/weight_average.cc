#include "model/state/weight_average.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <exception>

#include "comm/agreement.h"
#include "core/check.h"
#include "model/agreement/host_room.h"
#include "model/state/model_state.h"
#include "optim/chunked_update.h"

namespace ds::engine {

std::string ema_lines(const EmaOptions& options) {
  return cat(".ema.decay\t", options.decay, "\n.ema.warmup\t", options.warmup, "\n.ema.update_after_step\t",
             options.update_after_step, '\n');
}

void require_ema(const ModelState& state, const EmaOptions& options) {
  require<ConfigError>(options.decay > 0 && options.decay < 1, "initialize: .ema.decay: expected a number above 0 and ",
                       "below 1, such as 0.999, found ", options.decay);
  require<ConfigError>(options.update_after_step >= 0, "initialize: .ema.update_after_step: expected 0 or a positive ",
                       "number of updates, found ", options.update_after_step);
  require<ConfigError>(state.plan.trains, "initialize: .ema: expected none without an optimizer, whose updates it ",
                       "averages; add the section \"optimizer\" to the ds_config, or remove it");
  require<ConfigError>(state.plan.offload.optimizer != zero::Home::kFile, "initialize: .ema: expected ",
                       "zero_optimization.offload_optimizer.device \"cpu\" or \"none\", found \"nvme\", which would ",
                       "read all masters from the file again in every step");
  require<ConfigError>(state.plan.optimizer != "ZeroOneAdam", "initialize: .ema: expected an optimizer whose ranks ",
                       "have the same weights after each step, found ZeroOneAdam, whose ranks step by themselves ",
                       "between exchanges; use OneBitAdam, or remove it");
}

WeightAverage::WeightAverage(const ModelState& state, const EmaOptions& options) : state_(state), options_(options) {
  const at::NoGradGuard no_grad;
  int64_t host_bytes = 0;
  const auto dtype_of = [&](size_t b) { return optimizers::state_type(state.masters[b].scalar_type()); };
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    const auto element = static_cast<int64_t>(at::elementSize(dtype_of(b)));
    if (state.updates_on_host(b)) host_bytes += state.masters[b].numel() * element;
  }
  if (state.offloaded) {
    require_room_on_hosts(host_bytes, "moving average of the weights (.ema, beside offload_optimizer)",
                          state.ranks.device, *state.ranks.world);
  }
  std::exception_ptr failure;
  try {
    for (size_t b = 0; b < state.buckets.size(); ++b) {
      const at::Tensor& master = state.masters[b];
      values_.push_back(at::empty({master.numel()}, master.options().dtype(dtype_of(b))));
      read_master(b, [&](const at::Tensor& values) { values_[b].copy_(values); });
    }
  } catch (...) {
    failure = std::current_exception();
  }
  const int failed = comm::failed_rank(failure, state.ranks.device, *state.ranks.world);
  require<ConfigError>(failed < 0, "initialize: .ema: rank ", failed, " could not take memory for the moving average ",
                       "of its weights; its message says why");
}

void WeightAverage::read_master(size_t bucket, const std::function<void(const at::Tensor&)>& use) const {
  const auto read = [&] { state_.use_master(bucket, /*changes=*/false, use); };
  const bool is_slice = state_.own_part(bucket).is_alias_of(state_.masters[bucket]);
  if (!is_slice) return read();
  state_.buckets[bucket].kept_slice().use(/*changes=*/false, read);
}

double WeightAverage::decay_of(int64_t update) const {
  const auto n = static_cast<double>(update - options_.update_after_step);
  if (n <= 0) return 0;
  return options_.warmup ? std::min(options_.decay, (1 + n) / (10 + n)) : options_.decay;
}

void WeightAverage::update(const at::Tensor& skip) {
  const at::NoGradGuard no_grad;
  // Masters that are slices of the weights are on their way to other ranks, who only read them too: nobody waits.
  const at::RecordFunctionGuard not_seen(/*is_enabled=*/false);
  const double share = 1 - decay_of(++updates_);
  const at::Tensor device_share = skip.defined() ? skip.mul(-share).add_(share) : at::Tensor();
  for (size_t b = 0; b < values_.size(); ++b) {
    const auto add = [&](int64_t /*begin*/, const at::Tensor& average, const at::Tensor& master) {
      if (device_share.defined()) {
        average.lerp_(master, device_share.to(average.scalar_type()));
      } else {
        average.lerp_(master, share);
      }
    };
    read_master(b, [&](const at::Tensor& master) {
      optimizers::for_each_chunk(values_[b], master, optimizers::KernelMemory::kFused, add);
    });
  }
}

int64_t WeightAverage::bytes(bool in_host_memory) const {
  int64_t bytes = 0;
  for (size_t b = 0; b < values_.size(); ++b) {
    if (state_.updates_on_host(b) == in_host_memory) bytes += static_cast<int64_t>(values_[b].nbytes());
  }
  return bytes;
}

}  // namespace ds::engine
