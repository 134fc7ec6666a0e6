// The host's update of a bucket as soon as its reduced gradient is there, while backward still runs: before the norm
// and the overflow check of the whole gradient are known (SuperOffload, Lian et al., arXiv:2509.21271, "speculation
// then validation"). Nobody sees it until the step accepts it.
//
// Unlike the paper, which computes an update backwards, a bucket's master and states are copied before they change, so
// that a rejected update leaves no trace in any bit. New weights go to memory of their own.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "core/slices/reduced_gradients.h"
#include "core/task_queue.h"
#include "offload/host_gradients.h"
#include "offload/undo_copy.h"
#include "optim/shard_optimizer.h"

namespace ds::engine {

// Host memory, per bucket; empty and undefined for buckets that are not updated on the host.
struct SpeculationMemory {
  std::vector<std::vector<at::Tensor>> undo;  // like master and states: float32 [slice]
  std::vector<at::Tensor> weights;            // new weights: [slice] in the parameters' dtype
  at::Tensor gradient;  // as long as the longest slice, for updates that change the gradient they are given; else none
};

// Stands between the reducer and the gradients on the host. add() and clear() as of ReducedGradients; the rest belongs
// to the engine's thread, begin() to accept() or roll_back(). In between, masters, states and step count of the
// optimizer's slices on the host belong to this object's thread.
class SpeculativeUpdate final : public ReducedGradients {
 public:
  // `gradients` outlives it.
  SpeculativeUpdate(offload::HostGradients& gradients, SpeculationMemory memory);
  // Rolls back.
  ~SpeculativeUpdate() override;
  SpeculativeUpdate(const SpeculativeUpdate&) = delete;
  SpeculativeUpdate& operator=(const SpeculativeUpdate&) = delete;

  bool takes(size_t bucket) const override { return gradients_.takes(bucket); }
  // After begin(): the gradient is complete, its update begins.
  void add(size_t bucket, const at::Tensor& own) override;
  at::Tensor gradient(size_t bucket) override;
  // Rolls back, too.
  void clear() override;

  // Every gradient that arrives until end_arrivals() is the last one of its bucket. Begins the optimizer's step.
  // `gradient_scale` as of SliceOptimizer::update. `prepare`: sees each gradient before its update, on another thread;
  // may change it if there is memory for a copy.
  void begin(optimizers::SliceOptimizer& optimizer, double gradient_scale,
             std::function<void(const at::Tensor& gradient)> prepare);
  void end_arrivals() { arriving_ = false; }
  bool begun() const { return step_.has_value(); }
  // Whether what was begun is the update of `gradient_scale` with the optimizer's groups as they are now.
  bool fits(double gradient_scale) const;
  // Waits for the updates. If all are done, the optimizer keeps them and `publish` is called for each bucket, in
  // order, with its new weights: true. Else (one threw, which is logged) masters and states are as they were, the step
  // stays begun: false.
  bool accept(const std::function<void(size_t bucket, const at::Tensor& weights)>& publish);
  // Masters, states and step count are as they were in begin(), in every bit. Nothing where none was begun.
  void roll_back() noexcept;

 private:
  struct Step {
    optimizers::SliceOptimizer* optimizer = nullptr;
    double gradient_scale = 1.0;
    std::function<void(const at::Tensor&)> prepare;
    std::vector<optimizers::GroupOptions> groups;  // as begin_step() has seen them
    int64_t step_count = 0;                        // likewise
  };

  void update(size_t bucket);
  std::exception_ptr wait() noexcept;
  void restore();

  offload::HostGradients& gradients_;
  std::mutex gradients_mutex_;  // arrivals against updates
  SpeculationMemory memory_;
  std::vector<offload::UndoCopy> undo_;
  std::optional<Step> step_;
  bool arriving_ = false;
  std::atomic<bool> dropped_ = false;                      // updates that have not started need not
  std::vector<std::shared_ptr<TaskQueue::Task>> updates_;  // per bucket
  TaskQueue worker_;                                       // last: ends before what it uses
};

}  // namespace ds::engine
