#include "zero/gradient_reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <deque>
#include <thread>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "core/tensor_check.h"

namespace ds::zero {

// Note [Life of a gradient bucket]
// `local` collects what this rank's backward passes gave. A collective turns it into the reduced gradient, in place
// (stage 1: the own slice of it). A further backward before the step sets the reduced part aside in `reduced` and
// starts a new `local`; finish() adds the two. Stage 2 does that after every backward and gives `local` back to the
// pool.
struct GradientReducer::Bucket {
  const ParameterBucket* parameters = nullptr;
  at::Tensor local;          // [numel] gradient dtype
  std::vector<char> filled;  // per parameter of the bucket: local holds a gradient
  std::vector<char> seen;    // per parameter: had a gradient since reset()
  std::vector<char> fired;   // per parameter: had a gradient in this backward
  bool reduced_in_this_backward = false;
  size_t waiting = 0;     // parameters that have not fired in this backward
  bool launched = false;  // the collective on `local` was started
  comm::Work work;
  at::Tensor wire;     // what the collective runs on, when its dtype differs
  at::Tensor reduced;  // sum of earlier reductions: whole at stage 0, else the own slice
  at::Tensor slice;    // memory of `reduced` as a slice, kept from step to step
};

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
                                 ReduceRoutes routes, ReducerOptions options)
    : parameters_(parameters),
      communicator_(routes.slices),
      replicas_(routes.replicas),
      reduction_(routes.reduction),
      elsewhere_(routes.elsewhere),
      options_(options) {
  // One rank owns all slices: nothing is gained by reducing early, and gradients add up in place.
  if (communicator_.size() == 1 && transient() && !elsewhere_)
    options_.policy = ReductionPolicy::kReduceScatterAtBoundary;
  buckets_.resize(buckets.size());
  for (size_t b = 0; b < buckets.size(); ++b) {
    const auto& segments = buckets[b].layout().segments;
    buckets_[b].parameters = &buckets[b];
    buckets_[b].filled.assign(segments.size(), 0);
    buckets_[b].seen.assign(segments.size(), 0);
    for (size_t i = 0; i < segments.size(); ++i) {
      const Parameter& parameter = parameters_[static_cast<size_t>(segments[i].parameter)];
      parameter.tensor.mutable_grad().reset();
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
  if (local == local_) return;
  require(!transient() && !elsewhere_ && !replicas_, "gradients can stay local where whole buckets stay on the device ",
          "only: expected the reduction policy of stage 0 or 1");
  for (const Bucket& bucket : buckets_) {
    require(!bucket.launched && !bucket.reduced.defined(),
            "expected no gradient when it changes whether gradients are reduced; call zero_grad() first");
  }
  local_ = local;
}

void GradientReducer::begin_backward(bool synchronize, bool boundary, std::vector<char> in_pass) {
  const std::lock_guard lock(mutex_);
  require(!in_backward_, "backward() was called while a backward pass is running");
  require(!abandoned_, "backward() was called after one that failed; call zero_grad() first, which drops what it left");
  require(!joined_,
          "backward() was called after a step() that failed; call zero_grad() first, which drops what it left");
  next_ = 0;
  late_in_this_backward_ = false;
  reduce_in_this_backward_ = synchronize && (boundary || transient());
  // Elsewhere the pass that reduces does so for all before it.
  in_pass_ = transient() ? std::move(in_pass) : std::vector<char>();
  for (Bucket& bucket : buckets_) {
    if (bucket.launched) set_aside_reduced(bucket);
    bucket.waiting = bucket.filled.size();
    bucket.fired.assign(bucket.filled.size(), 0);
    bucket.reduced_in_this_backward = false;
  }
  in_backward_ = true;
}

void GradientReducer::end_backward() {
  const std::lock_guard lock(mutex_);
  in_backward_ = false;
  unreduced_ = !reduce_in_this_backward_;
  if (unreduced_) return;
  launch_ready(/*all=*/true);
  if (transient()) limit_in_flight(0);
  if (leaves_in_backward()) leave_in_order(0);
}

void GradientReducer::abandon_backward() {
  const std::lock_guard lock(mutex_);
  in_backward_ = false;
  abandoned_ = true;
}

void GradientReducer::on_gradient(size_t index, size_t position) {
  const std::lock_guard lock(mutex_);
  Bucket& bucket = buckets_[index];
  require(in_backward_, "parameter ",
          parameters_[static_cast<size_t>(bucket.parameters->layout().segments[position].parameter)].name,
          ": its gradient was made outside of engine->backward(). Expected engine->backward(loss) in place of "
          "loss.backward()");
  ensure(is_in_pass(index), "a pass gives gradients to the buckets it is said to");
  require(!bucket.reduced_in_this_backward, "parameter ",
          parameters_[static_cast<size_t>(bucket.parameters->layout().segments[position].parameter)].name,
          ": got a second gradient in one backward pass after its bucket was reduced; compute the gradient in one "
          "pass, or ",
          "set zero_optimization.overlap_comm to false");
  store_gradient(bucket, position);
  if (!std::exchange(bucket.fired[position], 1)) --bucket.waiting;
  if (reduce_in_this_backward_ && options_.overlap) launch_ready(/*all=*/false);
}

void GradientReducer::store_gradient(Bucket& bucket, size_t position) {
  const at::NoGradGuard no_grad;
  const Segment& segment = bucket.parameters->layout().segments[position];
  const at::Tensor& parameter = parameters_[static_cast<size_t>(segment.parameter)].tensor;
  at::Tensor gradient = parameter.grad();
  ensure(gradient.defined(), "a gradient hook runs after its gradient is set");
  if (gradient.layout() != at::kStrided) gradient = gradient.to_dense();
  if (check_) check_->see(segment.parameter, gradient);
  if (!bucket.local.defined()) open_local(bucket);
  const at::Tensor view = view_of(bucket.local, segment, parameter);
  const bool same_memory = gradient.data_ptr() == view.data_ptr() && gradient.scalar_type() == view.scalar_type();
  if (!same_memory) {
    if (bucket.filled[position]) {
      view.add_(gradient);
    } else {
      view.copy_(gradient);
    }
  }
  // The parameter's gradient is a view of the bucket, so that the next micro-batch adds in place; where the dtypes
  // differ (or the bucket is transient) the gradient is taken away and the next pass makes a new one.
  if (view.scalar_type() == parameter.scalar_type() && !transient()) {
    parameter.mutable_grad() = view;
  } else {
    parameter.mutable_grad().reset();
  }
  bucket.filled[position] = 1;
  bucket.seen[position] = 1;
}

void GradientReducer::open_local(Bucket& bucket) {
  bucket.local = take_buffer(bucket);
  zero_padding(bucket);
  std::fill(bucket.filled.begin(), bucket.filled.end(), 0);
}

void GradientReducer::zero_padding(Bucket& bucket) {
  for (const auto& [offset, length] : padding_of(bucket.parameters->layout()))
    bucket.local.narrow(0, offset, length).zero_();
}

at::Tensor GradientReducer::take_buffer(const Bucket& bucket) {
  const int64_t numel = bucket.parameters->layout().numel;
  auto fits = std::find_if(pool_.begin(), pool_.end(), [&](const at::Tensor& free) { return free.numel() >= numel; });
  if (fits != pool_.end()) {
    at::Tensor buffer = fits->narrow(0, 0, numel);
    pool_.erase(fits);
    return buffer;
  }
  if (!pool_.empty()) {  // too small for this bucket: replaced rather than kept beside
    note_bytes(-static_cast<int64_t>(pool_.back().nbytes()));
    pool_.pop_back();
  }
  const at::Tensor& flat = bucket.parameters->flat();
  at::Tensor buffer = at::empty({numel}, flat.options().dtype(options_.gradient_dtype));
  note_bytes(static_cast<int64_t>(buffer.nbytes()));
  return buffer;
}

void GradientReducer::give_back(at::Tensor buffer) {
  // The pool keeps whole storages: a narrowed view is widened again.
  const int64_t whole = static_cast<int64_t>(buffer.storage().nbytes() / buffer.element_size());
  pool_.push_back(buffer.as_strided({whole}, {1}, 0));
  std::sort(pool_.begin(), pool_.end(), [](const at::Tensor& a, const at::Tensor& b) { return a.numel() < b.numel(); });
  // A pass without reduction holds every bucket; buckets that are reduced in order never need more than these.
  constexpr size_t kPooled = 3;
  for (; pool_.size() > kPooled; pool_.erase(pool_.begin())) note_bytes(-static_cast<int64_t>(pool_.front().nbytes()));
}

void GradientReducer::fill_missing(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  if (!bucket.local.defined()) open_local(bucket);
  const auto& segments = bucket.parameters->layout().segments;
  for (size_t i = 0; i < segments.size(); ++i) {
    if (!bucket.filled[i]) bucket.local.narrow(0, segments[i].slice_offset, segments[i].length).zero_();
    bucket.filled[i] = 1;
  }
}

// Launches, in the fixed order, the buckets whose gradients are all there (or all buckets that hold something).
void GradientReducer::launch_ready(bool all) {
  while (next_ < buckets_.size()) {
    const size_t index = buckets_.size() - 1 - next_;
    Bucket& bucket = buckets_[index];
    if (!is_in_pass(index)) {
      ++next_;
      continue;
    }
    if (!all && bucket.waiting > 0) return;
    ++next_;
    launch(bucket);
    // Bounds the memory of stage 2: beside the buckets that fill, two are on their way.
    if (transient()) {
      limit_in_flight(2, /*inside_backward=*/!all);
    } else if (leaves_in_backward()) {
      leave_in_order(2);
    } else if (reduction_ || options_.communication_dtype != options_.gradient_dtype) {
      limit_wires(2);
    }
  }
}

// Bounds the memory of copies in another dtype, or compressed, where buckets stay until finish(). Of a reduction in
// several exchanges, it begins the later ones.
void GradientReducer::limit_wires(size_t allowed) {
  while (in_flight_.size() > allowed) {
    complete(buckets_[in_flight_.front()]);
    in_flight_.erase(in_flight_.begin());
  }
}

void GradientReducer::launch(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  fill_missing(bucket);
  if (reduction_) zero_padding(bucket);  // an overflow that is compressed spreads to its neighbours
  bucket.launched = true;
  bucket.reduced_in_this_backward = true;
  const size_t index = index_of(bucket);
  in_flight_.push_back(index);
  const int world = communicator_.size();
  if (world == 1 || local_) return;
  bucket.wire = options_.communication_dtype == bucket.local.scalar_type()
                    ? bucket.local
                    : bucket.local.to(options_.communication_dtype);
  auto op = comm::ReduceOp::kSum;
  if (options_.average && options_.prescale) {
    bucket.wire.div_(world);
  } else if (options_.average && options_.predivide_factor != 1.0) {
    bucket.wire.div_(options_.predivide_factor);
  } else if (options_.average) {
    op = comm::ReduceOp::kAvg;
  }
  const std::string label = cat("gradients of bucket ", index);
  if (reduction_) {
    bucket.work = reduction_->start(index, own_part(bucket, bucket.wire), bucket.wire, op, label);
  } else if (options_.policy == ReductionPolicy::kAllReduce) {
    bucket.work = communicator_.all_reduce(bucket.wire, op, label);
  } else {
    bucket.work = communicator_.reduce_scatter(own_part(bucket, bucket.wire), bucket.wire, op, label);
  }
}

at::Tensor GradientReducer::own_part(const Bucket& bucket, const at::Tensor& flat) const {
  if (options_.policy == ReductionPolicy::kAllReduce || communicator_.size() == 1 || local_) return flat;
  const int64_t length = bucket.parameters->layout().slice_numel;
  return flat.narrow(0, communicator_.rank() * length, length);
}

// Waits for a launched bucket; afterwards the own part of `local` is the reduced gradient.
void GradientReducer::complete(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  bucket.work.wait();
  bucket.work = {};
  if (!bucket.wire.defined()) return;
  const at::Tensor sent = own_part(bucket, bucket.wire);
  // Before the copy: the sum may be beyond what a narrower gradient_dtype holds.
  if (options_.average && !options_.prescale && options_.predivide_factor != 1.0) {
    at::Tensor(sent).mul_(options_.predivide_factor / communicator_.size());
  }
  if (!bucket.wire.is_same(bucket.local)) own_part(bucket, bucket.local).copy_(sent);
  bucket.wire.reset();
}

// Note [Hooks that wait at stage 3]
// A hook that waits for a reduction keeps this rank from its next gather. Ranks that have no gradient for a parameter
// start the reduction of its bucket at the end of their backward only, which they do not reach without that gather. A
// slow network looks like that from here: each pass that finds a reduction late lets the next ones wait for
// twice as long, and after kMostLatePasses of them no hook waits any more.
bool GradientReducer::ready_in_time(const Bucket& bucket) {
  constexpr int kMostLatePasses = 4;
  if (!options_.patience) return true;
  const auto begin = std::chrono::steady_clock::now();
  const auto until = begin + *options_.patience * (1 << late_passes_);
  while (!bucket.work.is_ready()) {
    if (late_in_this_backward_ || late_passes_ == kMostLatePasses) return false;
    if (std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      continue;
    }
    late_in_this_backward_ = true;
    if (++late_passes_ == kMostLatePasses) {
      log::warning("the reduction of gradients of bucket ", in_flight_.front(), " is late, as others were in ",
                   kMostLatePasses - 1, " backward passes before: another rank has no gradient for a parameter in it, ",
                   "or the network is slower than ", std::chrono::duration<double>(until - begin).count(),
                   " s for a bucket. Gradients stay in memory until backward ends from now on");
    }
    return false;
  }
  return true;
}

void GradientReducer::limit_in_flight(size_t allowed, bool inside_backward) {
  while (in_flight_.size() > allowed) {
    Bucket& bucket = buckets_[in_flight_.front()];
    if (inside_backward && !ready_in_time(bucket)) return;
    set_aside_reduced(bucket);
  }
}

// Moves the reduced gradient out of `local`, so that a new backward can start one.
void GradientReducer::set_aside_reduced(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  complete(bucket);
  std::erase(in_flight_, index_of(bucket));
  at::Tensor own = own_part(bucket, bucket.local);
  if (is_elsewhere(bucket)) {
    elsewhere_->add(index_of(bucket), own);
  } else if (bucket.reduced.defined()) {
    bucket.reduced.add_(own);
  } else {
    bucket.reduced = own.is_same(bucket.local) && !transient() ? bucket.local : kept_slice(bucket, own);
  }
  for (const Segment& segment : bucket.parameters->layout().segments) {
    parameters_[static_cast<size_t>(segment.parameter)].tensor.mutable_grad().reset();
  }
  if (!bucket.reduced.is_same(bucket.local)) give_back(bucket.local);
  bucket.local.reset();
  bucket.launched = false;
}

size_t GradientReducer::index_of(const Bucket& bucket) const { return static_cast<size_t>(&bucket - buckets_.data()); }

bool GradientReducer::is_elsewhere(const Bucket& bucket) const {
  return elsewhere_ && elsewhere_->takes(index_of(bucket));
}

// Where buckets stay: `local` stays allocated, empty, for the next backward.
void GradientReducer::move_elsewhere(Bucket& bucket) {
  elsewhere_->add(index_of(bucket), own_part(bucket, bucket.local));
  for (const Segment& segment : bucket.parameters->layout().segments) {
    parameters_[static_cast<size_t>(segment.parameter)].tensor.mutable_grad().reset();
  }
  std::fill(bucket.filled.begin(), bucket.filled.end(), 0);
  bucket.launched = false;
}

// Completes the oldest reductions until so many are under way.
void GradientReducer::leave_in_order(size_t staying) {
  while (in_flight_.size() > staying) {
    Bucket& bucket = buckets_[in_flight_.front()];
    complete(bucket);
    if (is_elsewhere(bucket)) move_elsewhere(bucket);
    in_flight_.erase(in_flight_.begin());
  }
}

// Slices would leave holes among the larger buffers if they were freed and made in every step.
at::Tensor GradientReducer::kept_slice(Bucket& bucket, const at::Tensor& own) {
  if (!bucket.slice.defined()) {
    bucket.slice = at::empty_like(own);
    note_bytes(static_cast<int64_t>(bucket.slice.nbytes()));
  }
  return bucket.slice.copy_(own);
}

void GradientReducer::drop_reduced(Bucket& bucket) {
  if (bucket.reduced.defined() && !bucket.reduced.is_same(bucket.slice)) {
    note_bytes(-static_cast<int64_t>(bucket.reduced.nbytes()));
  }
  bucket.reduced.reset();
}

void GradientReducer::finish() {
  const std::lock_guard lock(mutex_);
  require(!abandoned_, "step() was called after a backward() that failed; call zero_grad() and run backward() again");
  // `unreduced_` follows from the calls alone, never from which gradients a rank had: all ranks decide alike.
  for (size_t i = buckets_.size(); unreduced_ && i-- > 0;) {
    if (!buckets_[i].launched) launch(buckets_[i]);
  }
  unreduced_ = false;
  const at::NoGradGuard no_grad;
  for (Bucket& bucket : buckets_) {
    if (!bucket.launched) continue;
    complete(bucket);
    if (is_elsewhere(bucket)) move_elsewhere(bucket);
    if (!bucket.reduced.defined()) continue;
    // Both parts are reduced: join them in `local`, which the parameters' gradients are views of.
    own_part(bucket, bucket.local).add_(bucket.reduced);
    drop_reduced(bucket);
  }
  in_flight_.clear();
  join_replicas();
}

void GradientReducer::join_replicas() {
  if (replicas_ == nullptr || std::exchange(joined_, true)) return;
  const auto op = options_.average ? comm::ReduceOp::kAvg : comm::ReduceOp::kSum;
  struct Join {
    at::Tensor gradient;
    at::Tensor wire;  // what the collective runs on: on the device, also where the gradient is not
    comm::Work work;
  };
  std::deque<Join> joins;
  const auto finish_oldest = [&] {
    Join& join = joins.front();
    join.work.wait();
    if (!join.wire.is_same(join.gradient)) join.gradient.copy_(join.wire);
    joins.pop_front();
  };
  constexpr size_t kMostWires = 2;  // bounds the memory of copies
  for (size_t i = buckets_.size(); i-- > 0;) {
    const at::Tensor own = gradient(i);
    if (!own.defined()) continue;  // before any backward, on every rank
    joins.push_back({own, own.to(buckets_[i].parameters->flat().device(), options_.communication_dtype), {}});
    joins.back().work = replicas_->all_reduce(joins.back().wire, op, cat("gradients of bucket ", i));
    if (joins.size() > kMostWires) finish_oldest();
  }
  while (!joins.empty()) finish_oldest();
}

at::Tensor GradientReducer::gradient(size_t index) const {
  const Bucket& bucket = buckets_.at(index);
  if (is_elsewhere(bucket)) return elsewhere_->gradient(index);
  if (bucket.launched) return own_part(bucket, bucket.local);
  return bucket.reduced;
}

void GradientReducer::reset() {
  const std::lock_guard lock(mutex_);
  for (Bucket& bucket : buckets_) {
    if (bucket.launched) complete(bucket);
    for (const Segment& segment : bucket.parameters->layout().segments) {
      parameters_[static_cast<size_t>(segment.parameter)].tensor.mutable_grad().reset();
    }
    // `local` stays allocated where buckets stay: the next backward fills it again.
    if (transient() && bucket.local.defined()) {
      give_back(std::exchange(bucket.local, at::Tensor()));
    }
    std::fill(bucket.filled.begin(), bucket.filled.end(), 0);
    std::fill(bucket.seen.begin(), bucket.seen.end(), 0);
    drop_reduced(bucket);
    bucket.launched = false;
  }
  if (elsewhere_) elsewhere_->clear();
  in_flight_.clear();
  unreduced_ = false;
  abandoned_ = false;
  joined_ = false;
}

void GradientReducer::release_buffers() {
  reset();
  const std::lock_guard lock(mutex_);
  for (Bucket& bucket : buckets_) {
    bucket.local.reset();
    bucket.slice.reset();
  }
  pool_.clear();
  bytes_ = 0;
}

std::vector<int64_t> GradientReducer::parameters_without_gradient() const {
  std::vector<int64_t> result;
  for (const Bucket& bucket : buckets_) {
    const auto& segments = bucket.parameters->layout().segments;
    for (size_t i = 0; i < segments.size(); ++i) {
      if (!bucket.seen[i]) result.push_back(segments[i].parameter);
    }
  }
  std::sort(result.begin(), result.end());
  return result;
}

void GradientReducer::note_bytes(int64_t change) {
  bytes_ += change;
  peak_bytes_ = std::max(peak_bytes_, bytes_);
}

int64_t GradientReducer::take_peak_bytes() {
  const std::lock_guard lock(mutex_);
  return std::exchange(peak_bytes_, bytes_);
}

}  // namespace ds::zero
