// The state that a thread keeps of its regions: settings, buffers, statistics. Carried to the thread of autograd that
// computes a region again.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>
#include <mutex>
#include <vector>

#include "dsengine/activation_checkpoint.h"
#include "recompute/slot_pool.h"

namespace ds::recompute {

// Thread safe.
class StatisticsSum {
 public:
  void add(const CheckpointStatistics& more);
  CheckpointStatistics take();

 private:
  std::mutex mutex_;
  CheckpointStatistics sum_;
};

struct CheckpointThread {
  CheckpointOptions options;
  std::shared_ptr<SlotPool> slots = std::make_shared<SlotPool>();
  std::shared_ptr<StatisticsSum> statistics = std::make_shared<StatisticsSum>();

  static CheckpointThread& current();

  // Another thread's in place of this one's, while it lives.
  class Scope {
   public:
    explicit Scope(const CheckpointThread& other);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    std::unique_ptr<CheckpointThread> before_;
  };
};

// Ranks over which an engine has split its model, for partition_activations. Those of all engines of the process, each
// found by the tensors that are split over it: engines of one thread, and ranks that are threads, have others. Thread
// safe.
using RanksOfSplit = const comm::Communicator* (*)(const at::Tensor& split);
void add_split_group(std::shared_ptr<comm::Communicator> group, RanksOfSplit ranks_of);
void remove_split_group(const comm::Communicator* group) noexcept;
// Null for a tensor that is not split, or over ranks that nobody has added.
std::shared_ptr<comm::Communicator> split_group_of(const at::Tensor& tensor);

// Where a region begins and where it ends: waits for the devices if asked.
void checkpoint_boundary(const CheckpointOptions& options, const std::vector<at::Device>& devices);

}  // namespace ds::recompute
