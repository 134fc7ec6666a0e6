// The state that offload_optimizer and offload_param keep away from the device: which buckets, in which memory or file.
//
// Host memory is taken once, before training: one arena of exact size for each purpose (offload/pinned_arena.h), after
// a check that all ranks of the host find room for theirs. Where the device is the CPU the same code runs with host
// memory on both sides. Files have no name and go with the process (offload/unnamed_file.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "config/plan/plan.h"
#include "core/slices/reduced_gradients.h"
#include "core/slices/slice_store.h"
#include "core/task_queue.h"
#include "dsengine/comm.h"
#include "dsengine/config.h"
#include "model/offloaded/speculative_update.h"
#include "offload/file_slices.h"
#include "offload/host_gradients.h"
#include "offload/pinned_arena.h"
#include "offload/slice_swapper.h"
#include "offload/update_copies.h"
#include "optim/shard_optimizer.h"
#include "zero/partition.h"

namespace ds::engine {

// Elements and dtypes of what a rank of the job keeps.
struct OffloadedLayout {
  const std::vector<zero::BucketLayout>& buckets;  // trainable
  const std::vector<zero::BucketLayout>& frozen;   // stage 3
  std::vector<int64_t> states;                     // tensors of optimizer state for each trainable bucket
  at::ScalarType parameter_dtype = at::kFloat;
  at::ScalarType gradient_dtype = at::kFloat;
  at::ScalarType master_dtype = at::kFloat;
  at::ScalarType state_dtype = at::kFloat;  // dtype of optimizer states
  at::Device device = at::kCPU;
  int rank = 0;
};

// The offloaded state of one rank. Not thread safe, but for gradients().
class OffloadedState {
 public:
  // Takes memory and files. Collective over `world`: all ranks ask for room before any takes it. Throws ConfigError or
  // IoError, on every rank, when the host or the disk of one cannot hold them.
  OffloadedState(const Plan& plan, const config::DsConfig& config, const OffloadedLayout& layout,
                 comm::Communicator& world);

  // Whether the optimizer of this trainable bucket works here.
  bool updates(size_t bucket) const { return updates_.at(bucket); }
  // The bytes that were taken.
  const zero::OffloadedBytes& bytes() const { return bytes_; }
  // The store of the slices of sharded buckets, trainable and frozen. Null: slices lie beside their buckets.
  const std::shared_ptr<SliceStore>& parameter_slices() const { return parameter_slices_; }
  // The place where the reducer leaves gradients of these buckets. Null: none of them is here.
  ReducedGradients* gradients();
  // The update that stands between the reducer and the gradients with super_offload; else null.
  SpeculativeUpdate* speculation() { return speculation_.get(); }

  // The master of a bucket that is updated here: a copy of `values` ([slice]) in the masters' dtype, or undefined where
  // the slice of the bucket will be the master (of this dtype, and in host memory already).
  at::Tensor master_of(size_t bucket, const at::Tensor& values, bool sharded);
  // The memory for the states of the optimizer whose slices are the buckets. States in a file have no memory outside of
  // use().
  optimizers::StateMemory state_memory();

  // Calls `use` while master and states of the bucket are in memory, as they are without a speculative update, which is
  // undone. `changes`: what it writes there is kept.
  void use(size_t bucket, bool changes, const std::function<void()>& use);
  // Calls `update` for every bucket that is updated here, in order, as use() does; files are read and written beside.
  void for_each(const std::function<void(size_t bucket)>& update);
  // Updates one bucket, and puts the new weights into `own` on the device.
  void update(optimizers::SliceOptimizer& optimizer, size_t bucket, const at::Tensor& gradient, double gradient_scale,
              const at::Tensor& own);

  // The update of a step beside the next forward and backward (delayed parameter update, ZeRO-Offload, Ren et al.,
  // arXiv:2101.06840, section 5.2). start_update() takes the gradients that were reduced; until finish_update() the
  // optimizer belongs to the update. `prepare` sees each gradient before it is used, on the update's thread.
  void start_update(optimizers::SliceOptimizer& optimizer, double gradient_scale,
                    const std::function<void(const at::Tensor& gradient)>& prepare);
  bool update_runs() const { return running_ != nullptr; }
  // Returns when no update runs; what the last one made or threw is lost.
  void abandon_update() noexcept;
  // Returns when the update is done; then calls `publish` for each bucket with its new weights, on the host. Throws
  // what the update threw; its gradients are dropped then, and another update may follow.
  void finish_update(const std::function<void(size_t bucket, const at::Tensor& weights)>& publish);

 private:
  class Setup;

  at::Device device_;
  std::vector<char> updates_;
  std::vector<int64_t> states_;  // per bucket
  at::ScalarType master_dtype_;
  at::ScalarType state_dtype_;
  bool shares_master_ = false;
  zero::OffloadedBytes bytes_;
  std::shared_ptr<SliceStore> parameter_slices_;
  std::shared_ptr<offload::PinnedArena> optimizer_;  // masters and states
  std::unique_ptr<offload::SliceSwapper> swapper_;   // replaces optimizer_ where states are in a file
  offload::PassOptions pass_;
  std::vector<int64_t> swapped_;                // per bucket: its slice of swapper_
  std::vector<std::vector<at::Tensor>> fresh_;  // per bucket: states in a file that no optimizer has yet
  std::unique_ptr<offload::HostGradients> gradients_;
  std::unique_ptr<SpeculativeUpdate> speculation_;
  std::unique_ptr<offload::WriteBack> write_back_;

  // The tensors of delayed updates, per bucket.
  std::vector<at::Tensor> other_gradients_;  // memory into which no gradient arrives now
  std::vector<at::Tensor> taken_;            // gradients that the update uses
  std::vector<at::Tensor> weights_;          // new weights in the parameters' dtype
  std::shared_ptr<TaskQueue::Task> running_;
  TaskQueue worker_;  // last: ends before what it uses
};

}  // namespace ds::engine
