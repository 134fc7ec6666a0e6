#include "zero/reduction/gradient_reducer.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <utility>

#include "core/check.h"
#include "dsengine/comm.h"
#include "zero/memory_model.h"

namespace ds::zero {
namespace {

// Reductions that may be under way inside backward, beside the bucket that fills: bounds memory.
constexpr size_t kMostInFlight = 2;

ReducerOptions with_fitting_policy(ReducerOptions options, const ReduceRoutes& routes) {
  options.policy = fitting_policy(options.policy, routes.slices.size(), routes.elsewhere != nullptr);
  return options;
}

constexpr size_t kMostWires = 2;  // bounds the memory of copies

// Adds gradients that replicas of the model state have reduced each for itself (MiCS, Zhang et al., arXiv:2205.00119,
// section 3.3: once, at the boundary of an accumulation). For one boundary: add() for bucket after bucket, in the same
// order on every rank, then finish(). Both throw CommError. Ended without finish(), what is on its way is not waited
// for: the gradients are unspecified then.
class ReplicaJoin {
 public:
  // `op`: kSum or kAvg over the replicas.
  explicit ReplicaJoin(comm::ReduceOp op) : op_(op) {}

  // `gradient` becomes the sum or average over `replicas`, when finish() has returned. What travels has this dtype and
  // lies on `device`, also where the gradient does not.
  void add(comm::Communicator& replicas, const at::Tensor& gradient, at::Device device, at::ScalarType dtype,
           std::string label);
  void finish();

 private:
  struct Part {
    at::Tensor gradient;
    at::Tensor wire;  // the tensor that the collective runs on
    comm::Work work;
  };
  void finish_oldest();

  comm::ReduceOp op_;
  std::deque<Part> parts_;  // under way
};

void ReplicaJoin::add(comm::Communicator& replicas, const at::Tensor& gradient, at::Device device, at::ScalarType dtype,
                      std::string label) {
  Part& part = parts_.emplace_back(Part{gradient, gradient.to(device, dtype), {}});
  part.work = replicas.all_reduce(part.wire, op_, std::move(label));
  if (parts_.size() > kMostWires) finish_oldest();
}

void ReplicaJoin::finish() {
  while (!parts_.empty()) finish_oldest();
}

void ReplicaJoin::finish_oldest() {
  Part& part = parts_.front();
  part.work.wait();
  if (!part.wire.is_same(part.gradient)) part.gradient.copy_(part.wire);
  parts_.pop_front();
}

}  // namespace

class GradientReducer::Hook : public torch::autograd::PostAccumulateGradHook {
 public:
  Hook(GradientReducer& reducer, size_t bucket, size_t position)
      : reducer_(reducer), bucket_(bucket), position_(position) {}
  void operator()(const torch::autograd::Variable& /*parameter*/) override { reducer_.on_gradient(bucket_, position_); }

 private:
  GradientReducer& reducer_;
  size_t bucket_;
  size_t position_;
};

GradientReducer::GradientReducer(const std::vector<ParameterBucket>& buckets, const std::vector<Parameter>& parameters,
                                 ReduceRoutes routes, const ReducerOptions& options)
    : parameters_(parameters),
      exchange_(routes, with_fitting_policy(options, routes)),
      elsewhere_(routes.elsewhere),
      late_(options.patience),
      neighbours_(parameters, options.model, /*alone=*/options.plain_passes) {
  buckets_.reserve(buckets.size());
  for (size_t b = 0; b < buckets.size(); ++b) {
    buckets_.emplace_back(b, buckets[b], exchange_, buffers_);
    const auto& segments = buckets[b].layout().segments;
    for (size_t i = 0; i < segments.size(); ++i) {
      const Parameter& parameter = parameters_[static_cast<size_t>(segments[i].parameter)];
      if (!options.plain_gradients()) parameter.tensor.mutable_grad().reset();
      torch::autograd::impl::set_post_acc_grad_hooks(parameter.tensor, std::make_unique<Hook>(*this, b, i));
    }
  }
}

GradientReducer::~GradientReducer() {
  for (const Parameter& parameter : parameters_) {
    torch::autograd::impl::set_post_acc_grad_hooks(parameter.tensor, nullptr);
  }
}

void GradientReducer::keep_local(bool local) {
  const std::lock_guard lock(mutex_);
  if (local == exchange_.keeps_local()) return;
  require(!transient() && !elsewhere_ && !has_replicas(),
          "gradients can stay local where whole buckets stay on the device ",
          "only: expected the reduction policy of stage 0 or 1");
  for (const GradientBucket& bucket : buckets_) {
    require(!bucket.launched() && !bucket.has_sum(),
            "expected no gradient when it changes whether gradients are reduced; call zero_grad() first");
  }
  exchange_.keep_local(local);
}

void GradientReducer::begin_backward(bool synchronize, bool boundary, std::vector<char> in_pass) {
  const std::lock_guard lock(mutex_);
  require(!running(), "backward() was called while a backward pass is running");
  if (failed() && exchange_.options().plain_gradients()) recover();
  require(!failed(), "backward() was called after one that failed; call zero_grad() first, which drops what it left");
  neighbours_.require_none("backward()");
  require(state_ != PassState::kJoined,
          "backward() was called after a step() that failed; call zero_grad() first, which drops what it left");
  const bool reduces = synchronize && (boundary || transient());
  const PassState next = after(state_, reduces ? PassEvent::kBeginReducing : PassEvent::kBeginLocal);
  next_ = 0;
  late_.begin_pass();
  neighbours_.come_back();
  // Where passes before this one are not reduced, it reduces for all of them.
  in_pass_ = transient() && state_ == PassState::kIdle ? std::move(in_pass) : std::vector<char>();
  for (GradientBucket& bucket : buckets_) {
    if (bucket.launched()) {
      complete(bucket);
      if (!exchange_.options().plain_gradients()) set_aside(bucket);
    }
    bucket.begin_pass();
  }
  neighbours_.begin();
  state_ = next;
}

// Ranks that failed alike have launched as many reductions, which end; of others the failure is told here.
void GradientReducer::recover() {
  for (GradientBucket& bucket : buckets_) {
    if (bucket.state() == BucketState::kInFlight) complete(bucket);
  }
  in_flight_.clear();
  state_ = after(state_, PassEvent::kReset);
}

void GradientReducer::end_backward() {
  const std::lock_guard lock(mutex_);
  neighbours_.end();
  waits_for_end_ = false;
  const bool reduces = state_ == PassState::kReducing;
  state_ = after(state_, PassEvent::kEnd);
  if (!reduces) return;
  launch_ready(/*all=*/true);
  if (transient() || leaves_in_backward()) retire(0, /*inside_backward=*/false);
}

void GradientReducer::abandon_backward() {
  const std::lock_guard lock(mutex_);
  neighbours_.end();
  waits_for_end_ = false;
  if (exchange_.options().plain_gradients()) {
    // A reduction under way ends later, over what the program and the next pass have made of these gradients by then.
    for (GradientBucket& bucket : buckets_) {
      if (bucket.state() == BucketState::kInFlight) bucket.drop_parameter_gradients();
    }
  }
  state_ = after(state_, PassEvent::kFail);
}

void GradientReducer::on_gradient(size_t index, size_t position) {
  if (enter_) enter_();
  const std::lock_guard lock(mutex_);
  GradientBucket& bucket = buckets_[index];
  if (!running() && neighbours_.another_runs()) {
    return neighbours_.drop(static_cast<size_t>(bucket.parameter_index(position)));
  }
  require(running(), "parameter ", bucket.parameters()[position].name, " of ", neighbours_.model(),
          ": its gradient was made outside of engine->backward(). Expected engine->backward(loss) in place of "
          "loss.backward()");
  ensure(is_in_pass(index), "a pass gives gradients to the buckets it is said to");
  require(!had_its_turn(index), "parameter ", bucket.parameters()[position].name,
          ": got a second gradient in one backward pass after its bucket was reduced; compute the gradient in one "
          "pass, or ",
          exchange_.options().plain_passes ? "set static_graph, which then reduces at the end of each pass"
                                           : "set zero_optimization.overlap_comm to false");
  any_repeated_ = any_repeated_ || bucket.has_arrived(position);
  bucket.collect(position, check_);
  if (state_ == PassState::kReducing && exchange_.options().overlap && !waits_for_end_) launch_ready(/*all=*/false);
}

// Launches, in the fixed order, the buckets whose gradients are all there (or all of the pass).
void GradientReducer::launch_ready(bool all) {
  const bool bounded = transient() || leaves_in_backward() || exchange_.makes_copies();
  while (next_ < buckets_.size()) {
    const size_t index = buckets_.size() - 1 - next_;
    const bool in_pass = is_in_pass(index);
    if (in_pass && !all && !buckets_[index].all_arrived()) return;
    ++next_;
    if (!in_pass) continue;
    launch(buckets_[index]);
    if (bounded) retire(kMostInFlight, /*inside_backward=*/!all);
  }
}

void GradientReducer::launch(GradientBucket& bucket) {
  bucket.launch();
  in_flight_.push_back(bucket.index());
}

void GradientReducer::complete(GradientBucket& bucket) {
  if (bucket.state() == BucketState::kInFlight) bucket.complete();
  std::erase(in_flight_, bucket.index());
}

void GradientReducer::set_aside(GradientBucket& bucket) {
  bucket.set_aside(is_elsewhere(bucket) ? elsewhere_ : nullptr);
}

// Completes the oldest reductions until so many are under way; of a reduction in several exchanges, that begins the
// later ones. Gradients leave the buckets that are given back, and those that can leave early for elsewhere.
void GradientReducer::retire(size_t staying, bool inside_backward) {
  while (in_flight_.size() > staying) {
    GradientBucket& bucket = buckets_[in_flight_.front()];
    if (inside_backward && !late_.in_time(bucket.work(), bucket.index(), [&] { return bucket.launch_reached(); }))
      return;
    complete(bucket);
    if (transient() || (leaves_in_backward() && is_elsewhere(bucket))) set_aside(bucket);
  }
}

void GradientReducer::finish() {
  const std::lock_guard lock(mutex_);
  neighbours_.require_none("step()");
  require(!failed(), "step() was called after a backward() that failed; call zero_grad() and run backward() again");
  require(!running(), "step() was called while a backward pass is running; call it after engine->backward() returns");
  if (state_ == PassState::kUnreduced) {
    // Follows from the calls alone, never from which gradients a rank had: all ranks decide alike.
    for (size_t i = buckets_.size(); i-- > 0;) {
      if (!buckets_[i].launched()) launch(buckets_[i]);
    }
  }
  state_ = after(state_, PassEvent::kFinish);
  for (GradientBucket& bucket : buckets_) {
    if (!bucket.launched()) continue;
    complete(bucket);
    if (is_elsewhere(bucket)) {
      set_aside(bucket);
    } else {
      bucket.join_sum();
    }
  }
  join_replicas();
}

// All buckets in one order, for replicas have one too. A join that throws is not tried again: what was added is
// unknown.
void GradientReducer::join_replicas() {
  if (state_ == PassState::kJoined || !has_replicas()) return;
  state_ = after(state_, PassEvent::kJoin);
  const at::NoGradGuard no_grad;
  const ReducerOptions& options = exchange_.options();
  ReplicaJoin join(options.average ? comm::ReduceOp::kAvg : comm::ReduceOp::kSum);
  for (size_t i = buckets_.size(); i-- > 0;) {
    comm::Communicator* const replicas = exchange_.groups_of(i).replicas;
    const at::Tensor own = replicas ? gradient(i) : at::Tensor();
    if (!own.defined()) continue;  // before any backward, on every rank
    join.add(*replicas, own, buckets_[i].device(), options.dtype_sent(i), cat("gradients of bucket ", i));
  }
  join.finish();
}

void GradientReducer::show_gradients(const std::vector<char>& used, double factor) {
  const std::lock_guard lock(mutex_);
  for (GradientBucket& bucket : buckets_) bucket.show(used, factor);
}

bool GradientReducer::has_replicas() const {
  return std::any_of(buckets_.begin(), buckets_.end(), [&](const GradientBucket& bucket) {
    return exchange_.groups_of(bucket.index()).replicas != nullptr;
  });
}

at::Tensor GradientReducer::gradient(size_t index) const {
  const GradientBucket& bucket = buckets_.at(index);
  return is_elsewhere(bucket) ? elsewhere_->gradient(index) : bucket.gradient();
}

void GradientReducer::reset() {
  const std::lock_guard lock(mutex_);
  drop_all();
}

void GradientReducer::drop_all() {
  require(!running(), "gradients were to be dropped while a backward pass is running; call zero_grad() after it");
  for (GradientBucket& bucket : buckets_) bucket.reset();
  if (elsewhere_) elsewhere_->clear();
  neighbours_.clear();
  in_flight_.clear();
  state_ = after(state_, PassEvent::kReset);
}

void GradientReducer::release_buffers() {
  const std::lock_guard lock(mutex_);
  drop_all();
  for (GradientBucket& bucket : buckets_) bucket.release();
  buffers_.clear();
}

std::vector<int64_t> GradientReducer::parameters_without_gradient() const {
  std::vector<int64_t> result;
  for (const GradientBucket& bucket : buckets_) {
    for (size_t i = 0; i < bucket.parameters().size(); ++i) {
      if (bucket.without_gradient(i)) result.push_back(bucket.parameter_index(i));
    }
  }
  std::sort(result.begin(), result.end());
  return result;
}

int64_t GradientReducer::take_peak_bytes() {
  const std::lock_guard lock(mutex_);
  return buffers_.take_peak_bytes();
}

}  // namespace ds::zero
