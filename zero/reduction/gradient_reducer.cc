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

// The options that fit where the results go.
ReducerOptions fit_to_routes(ReducerOptions options, const ReduceRoutes& routes) {
  options.policy = fitting_policy(options.policy, routes.slices.size(), routes.elsewhere != nullptr);
  options.leave_in_backward = options.leave_in_backward && routes.elsewhere != nullptr;
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

bool have_replicas(const std::vector<GradientBucket>& buckets, const GradientExchange& exchange) {
  return std::any_of(buckets.begin(), buckets.end(), [&](const GradientBucket& bucket) {
    return exchange.groups_of(bucket.index()).replicas != nullptr;
  });
}

// All buckets in one order, for replicas have one too.
void join_replicas(const std::vector<GradientBucket>& buckets, const GradientExchange& exchange) {
  const at::NoGradGuard no_grad;
  const ReducerOptions& options = exchange.options();
  ReplicaJoin join(options.average ? comm::ReduceOp::kAvg : comm::ReduceOp::kSum);
  for (size_t i = buckets.size(); i-- > 0;) {
    comm::Communicator* const replicas = exchange.groups_of(i).replicas;
    const at::Tensor own = replicas ? buckets[i].gradient() : at::Tensor();
    if (!own.defined()) continue;  // before any backward, on every rank
    const at::Device device = buckets[i].parameters().options().device();
    join.add(*replicas, own, device, options.dtype_sent(i), cat("gradients of bucket ", i));
  }
  join.finish();
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
      exchange_(routes, fit_to_routes(options, routes)),
      elsewhere_(routes.elsewhere),
      queue_(buckets_, exchange_, options.patience),
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
  require(!exchange_.options().transient() && !elsewhere_ && !have_replicas(buckets_, exchange_),
          "gradients can stay local where whole buckets stay on the device ",
          "only: expected the reduction policy of stage 0 or 1, and no mics_shard_size");
  for (const GradientBucket& bucket : buckets_) {
    require(!bucket.launched() && !bucket.has_sum(),
            "expected no gradient when it changes whether gradients are reduced; call zero_grad() first");
  }
  exchange_.keep_local(local);
}

void GradientReducer::begin_backward(bool synchronize, bool boundary, std::vector<char> in_pass) {
  const std::lock_guard lock(mutex_);
  const ReducerOptions& options = exchange_.options();
  require(!is_running(state_), "backward() was called while a backward pass is running");
  if (failed() && options.plain_gradients()) {
    // Ranks that failed alike have launched as many reductions, which end; of others the failure is told here.
    queue_.complete_all();
    state_ = after(state_, PassEvent::kReset);
  }
  require(!failed(), "backward() was called after one that failed; call zero_grad() first, which drops what it left");
  neighbours_.require_no_gradients("backward()");
  require(state_ != PassState::kJoined,
          "backward() was called after a step() that failed; call zero_grad() first, which drops what it left");
  const bool reduces = synchronize && (boundary || options.transient());
  const PassState next = after(state_, reduces ? PassEvent::kBeginReducing : PassEvent::kBeginLocal);
  neighbours_.come_back();
  // Where passes before this one are not reduced, it reduces for all of them.
  queue_.begin_pass(options.transient() && state_ == PassState::kIdle ? std::move(in_pass) : std::vector<char>());
  neighbours_.begin();
  state_ = next;
}

void GradientReducer::end_backward() {
  const std::lock_guard lock(mutex_);
  neighbours_.end();
  waits_for_end_ = false;
  const bool reduces = state_ == PassState::kReducing;
  state_ = after(state_, PassEvent::kEnd);
  if (reduces) queue_.launch_rest();
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
  const auto number = static_cast<size_t>(bucket.parameters().layout().segments[position].parameter);
  // Autograd calls the hook also where nothing flows to the parameter: from a function that gives no gradient for it,
  // or from a checkpointed region that has read it without a graph.
  if (!parameters_[number].tensor.grad().defined()) return;
  if (!is_running(state_) && neighbours_.another_runs()) return neighbours_.drop(number);
  if (!is_running(state_) && !exchange_.options().plain_gradients()) {
    parameters_[number].tensor.mutable_grad().reset();  // else the next pass would add to it
  }
  require(is_running(state_), "parameter ", parameters_[number].name, " of ", neighbours_.model(),
          ": its gradient was made outside of engine->backward(). Expected engine->backward(loss) in place of "
          "loss.backward(); where an input's gradient alone is wanted, torch::autograd::grad({loss}, {input})");
  ensure(queue_.is_in_pass(index), "a pass gives gradients to the buckets it is said to");
  require(!queue_.had_its_turn(index), "parameter ", parameters_[number].name,
          ": got a second gradient in one backward pass after its bucket was reduced; compute the gradient in one "
          "pass, or ",
          exchange_.options().plain_passes ? "set static_graph, which then reduces at the end of each pass"
                                           : "set zero_optimization.overlap_comm to false");
  any_repeated_ = any_repeated_ || bucket.has_arrived(position);
  bucket.collect(position, check_);
  if (state_ == PassState::kReducing && exchange_.options().overlap && !waits_for_end_) queue_.launch_ready();
}

void GradientReducer::finish() {
  const std::lock_guard lock(mutex_);
  neighbours_.require_no_gradients("step()");
  require(!failed(), "step() was called after a backward() that failed; call zero_grad() and run backward() again");
  require(!is_running(state_),
          "step() was called while a backward pass is running; call it after engine->backward() returns");
  // Follows from the calls alone, never from which gradients a rank had: all ranks decide alike.
  if (state_ == PassState::kUnreduced) queue_.launch_all();
  state_ = after(state_, PassEvent::kFinish);
  queue_.finish();
  if (state_ == PassState::kJoined || !have_replicas(buckets_, exchange_)) return;
  state_ = after(state_, PassEvent::kJoin);  // a join that throws is not tried again: what was added is unknown
  join_replicas(buckets_, exchange_);
}

void GradientReducer::show_gradients(const std::vector<char>& used, double factor) {
  const std::lock_guard lock(mutex_);
  for (GradientBucket& bucket : buckets_) bucket.show(used, factor);
}

at::Tensor GradientReducer::gradient(size_t bucket) const { return buckets_.at(bucket).gradient(); }

void GradientReducer::reset() {
  const std::lock_guard lock(mutex_);
  drop_all();
}

void GradientReducer::drop_all() {
  require(!is_running(state_),
          "gradients were to be dropped while a backward pass is running; call zero_grad() after it");
  for (GradientBucket& bucket : buckets_) bucket.reset();
  if (elsewhere_) elsewhere_->clear();
  neighbours_.clear();
  queue_.clear();
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
    const auto& segments = bucket.parameters().layout().segments;
    for (size_t i = 0; i < segments.size(); ++i) {
      if (bucket.without_gradient(i)) result.push_back(segments[i].parameter);
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
