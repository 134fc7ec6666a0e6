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
#include "offload/update_copies.h"
#include "optim/shard_optimizer.h"

namespace ds::engine {

// How the speculation of a step ended; kNone: the step did without.
enum class SpeculationOutcome { kNone, kStood, kRolledBack };

// Decides whether the next update may begin before its gradient is judged.
//
// A speculative update that is rolled back costs a copy and an update for nothing. After kFailures of them in a row
// speculation pauses, for kPause optimizer steps at first; then one more is tried. Each that fails is followed by a
// pause twice as long, up to kLongestPause. It follows from outcomes that all ranks share: all of them decide alike.
class SpeculationGate {
 public:
  static constexpr int64_t kFailures = 3;
  static constexpr int64_t kPause = 32;
  static constexpr int64_t kLongestPause = 1024;

  bool open() const { return pause_left_ == 0; }
  // To be called once in every optimizer step, skipped ones too. Returns how many steps the pause that begins now
  // lasts, else 0.
  int64_t step(SpeculationOutcome outcome);

  int64_t pauses() const { return pauses_; }  // so far
  int64_t stood() const { return stood_; }
  int64_t rolled_back() const { return rolled_back_; }
  int64_t steps_without() const { return without_; }

 private:
  int64_t failures_in_a_row_ = 0;
  int64_t next_pause_ = kPause;
  int64_t pause_left_ = 0;
  int64_t pauses_ = 0;
  int64_t stood_ = 0;
  int64_t rolled_back_ = 0;
  int64_t without_ = 0;
};

// The host memory of speculation, per bucket; empty and undefined for buckets that are not updated on the host.
struct SpeculationMemory {
  std::vector<std::vector<at::Tensor>> undo;  // like master and states: float32 [slice]
  std::vector<at::Tensor> weights;            // new weights: [slice] in the parameters' dtype
  at::Tensor gradient;  // as long as the longest slice, for updates that change the gradient they are given; else none
};

// Stands between the reducer and the gradients on the host. add() and clear() are called as ReducedGradients says; the
// rest belongs to the engine's thread, begin() to accept() or roll_back(). In between, masters, states and step count
// of the optimizer's slices on the host belong to this object's thread.
class SpeculativeUpdate final : public ReducedGradients {
 public:
  // `gradients` outlives the object.
  SpeculativeUpdate(offload::HostGradients& gradients, SpeculationMemory memory);
  // Rolls back.
  ~SpeculativeUpdate() override;
  SpeculativeUpdate(const SpeculativeUpdate&) = delete;
  SpeculativeUpdate& operator=(const SpeculativeUpdate&) = delete;

  bool takes(size_t bucket) const override { return gradients_.takes(bucket); }
  // Takes a reduced gradient. After begin() it is complete, and its update begins.
  void add(size_t bucket, const at::Tensor& own) override;
  at::Tensor gradient(size_t bucket) override;
  // Rolls back and drops the gradients.
  void clear() override;

  // Every gradient that arrives until end_arrivals() is the last one of its bucket. Begins the optimizer's step.
  // `gradient_scale` is that of SliceOptimizer::update(). `prepare`: sees each gradient before its update, on another
  // thread; may change it if there is memory for a copy.
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
  // Puts masters, states and step count back to what they were in begin(), in every bit. Does nothing where no step was
  // begun.
  void roll_back() noexcept;

 private:
  struct Step {
    optimizers::SliceOptimizer* optimizer = nullptr;
    double gradient_scale = 1.0;
    std::function<void(const at::Tensor&)> prepare;
    std::vector<optimizers::GroupOptions> groups;  // the groups that begin_step() has seen
    int64_t step_count = 0;                        // the count that begin_step() has seen
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
