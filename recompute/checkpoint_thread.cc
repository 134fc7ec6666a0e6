#include "recompute/checkpoint_thread.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "core/check.h"

namespace ds::recompute {

void StatisticsSum::add(const CheckpointStatistics& more) {
  const std::lock_guard lock(mutex_);
  sum_.regions += more.regions;
  sum_.recomputations += more.recomputations;
  sum_.bytes_kept += more.bytes_kept;
  sum_.forward_seconds += more.forward_seconds;
  sum_.recomputation_seconds += more.recomputation_seconds;
}

CheckpointStatistics StatisticsSum::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(sum_, {});
}

CheckpointThread& CheckpointThread::current() {
  static thread_local CheckpointThread instance;
  return instance;
}

CheckpointThread::Scope::Scope(const CheckpointThread& other)
    : before_(std::make_unique<CheckpointThread>(std::exchange(current(), other))) {}

CheckpointThread::Scope::~Scope() { current() = std::move(*before_); }

void configure_checkpointing(const CheckpointOptions& options) {
  require(options.number_checkpoints.value_or(1) > 0,
          "configure_checkpointing: number_checkpoints: expected a positive number, found ",
          options.number_checkpoints.value_or(0));
  CheckpointThread& thread = CheckpointThread::current();
  thread.options = options;
  thread.slots = std::make_shared<SlotPool>();
}

const CheckpointOptions& checkpoint_options() { return CheckpointThread::current().options; }

CheckpointStatistics take_checkpoint_statistics() { return CheckpointThread::current().statistics->take(); }

void checkpoint_boundary(const CheckpointOptions& options, const std::vector<at::Device>& devices) {
  if (!options.synchronize_checkpoint_boundary) return;
  for (const at::Device device : devices) {
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  }
}

}  // namespace ds::recompute
