#include "recompute/checkpoint_thread.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/split/split_tensor.h"

namespace ds::recompute {
namespace {

struct SplitGroup {
  std::shared_ptr<comm::Communicator> group;
  RanksOfSplit ranks_of = nullptr;
};

struct SplitGroups {
  std::mutex mutex;
  std::vector<SplitGroup> all;  // engines over the same ranks have one each
};

// Never destroyed: an engine may be a static object.
SplitGroups& split_groups() {
  static auto* const kGroups = new SplitGroups;
  return *kGroups;
}

}  // namespace

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

void add_split_group(std::shared_ptr<comm::Communicator> group, RanksOfSplit ranks_of) {
  SplitGroups& groups = split_groups();
  const std::lock_guard lock(groups.mutex);
  groups.all.push_back({std::move(group), ranks_of});
}

void remove_split_group(const comm::Communicator* group) noexcept {
  SplitGroup removed;  // after the lock
  SplitGroups& groups = split_groups();
  const std::lock_guard lock(groups.mutex);
  const auto at = std::find_if(groups.all.begin(), groups.all.end(),
                               [&](const SplitGroup& known) { return known.group.get() == group; });
  if (at == groups.all.end()) return;
  removed = std::move(*at);
  groups.all.erase(at);
}

std::shared_ptr<comm::Communicator> split_group_of(const at::Tensor& tensor) {
  if (!is_split(tensor)) return nullptr;
  SplitGroups& groups = split_groups();
  const std::lock_guard lock(groups.mutex);
  for (const SplitGroup& known : groups.all) {
    if (known.ranks_of(tensor) == known.group.get()) return known.group;
  }
  return nullptr;
}

void checkpoint_boundary(const CheckpointOptions& options, const std::vector<at::Device>& devices) {
  if (!options.synchronize_checkpoint_boundary) return;
  for (const at::Device device : devices) {
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  }
}

}  // namespace ds::recompute
