#include "zero/parameter_gatherer.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "comm/quantized_collectives.h"
#include "core/check.h"
#include "core/log.h"

namespace ds::zero {
namespace {

std::vector<int64_t> elements_of(const std::vector<ParameterBucket*>& buckets) {
  std::vector<int64_t> elements;
  for (const ParameterBucket* bucket : buckets) elements.push_back(bucket->layout().numel);
  return elements;
}

// Without an order to go by, what was used this many uses ago is taken to be done with.
constexpr uint64_t kRecentUses = 2;

std::exception_ptr lost_change(const std::string& name) {
  return std::make_exception_ptr(
      UsageError(cat("parameter ", name, " was changed in place while it was gathered for an operator; ",
                     "at stage 3 the change is lost. Change parameters in a scope of ",
                     "engine->gathered_parameters(..., modifier_rank)")));
}

}  // namespace

bool is_part_of(const at::Tensor& tensor, const Parameter& parameter) {
  if (!tensor.is_alias_of(parameter.tensor)) return false;
  const int64_t offset = tensor.storage_offset() - parameter.tensor.storage_offset();
  return offset >= 0 && offset < parameter.tensor.numel();
}

ParameterGatherer::ParameterGatherer(const std::vector<ParameterBucket*>& buckets, GatherRoutes routes,
                                     GatherLimits limits)
    : communicator_(routes.slices),
      node_(routes.node),
      bits_(routes.bits),
      limits_(limits),
      trace_(elements_of(buckets)),
      current_(buckets.size()),
      copies_(buckets.at(0)->flat().device()),
      meeting_(at::zeros({1}, buckets.at(0)->flat().options())),
      interceptor_([this](const at::Tensor& tensor) { before_read(tensor); }) {
  for (size_t b = 0; b < buckets.size(); ++b) {
    Entry entry;
    entry.bucket = buckets[b];
    entry.label = "parameters of bucket " + buckets[b]->describe(b);
    entry.state = buckets[b]->sharded() ? State::kReleased : State::kWhole;
    bucket_of_storage_.emplace(buckets[b]->flat().storage().unsafeGetStorageImpl(), b);
    if (buckets[b]->sharded()) sharded_ += buckets[b]->layout().numel;
    entries_.push_back(std::move(entry));
  }
  if (communicator_.size() == 1 && sharded_ == 0) return;
  require(at::isRecordFunctionEnabled(),
          "stage 3 sees operators through at::RecordFunction, which is disabled on this ",
          "thread; call at::enableRecordFunction(true) before initialize");
  interceptor_.enable();
}

ParameterGatherer::~ParameterGatherer() {
  choose_cast_cache(true);
  try {
    wait_all();
  } catch (const std::exception& error) {
    log::warning("gathering parameters failed: ", error.what());
  }
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard not_intercepted(/*is_enabled=*/false);
  for (const Entry& entry : entries_) {
    if (!entry.bucket->sharded()) continue;
    // Without memory a read would be a fault; without elements it is an error of shapes.
    for (const Parameter& parameter : entry.bucket->parameters()) {
      at::Tensor tensor = parameter.tensor;
      tensor.set_data(at::empty({0}, tensor.options().requires_grad(false)));
    }
  }
}

void ParameterGatherer::before_read(const at::Tensor& tensor) {
  const auto found = bucket_of_storage_.find(tensor.storage().unsafeGetStorageImpl());
  if (found == bucket_of_storage_.end()) return;
  const size_t bucket = found->second;
  Entry& entry = entries_[bucket];
  if (entry.bucket->sharded() && !in_backward_) choose_cast_cache(at::GradMode::is_enabled());
  if (entry.state == State::kWhole && (!entry.bucket->sharded() || entry.held > 0)) return;
  entry.used_by = OpInterceptor::outermost_operator();
  if (bucket != current_ || entry.state != State::kWhole) use(bucket);
  if (entry.bucket->sharded() && entry.held == 0 && OpInterceptor::changes_tensor()) refuse_change(entry, tensor);
}

// Of this thread. It is left alone where somebody else has turned it off.
void ParameterGatherer::choose_cast_cache(bool on) {
  const bool stays = on ? !cast_cache_off_ : !at::autocast::is_autocast_cache_enabled();
  if (stays) return;
  at::autocast::set_autocast_cache_enabled(on);
  cast_cache_off_ = !on;
}

void ParameterGatherer::refuse_change(Entry& entry, const at::Tensor& tensor) {
  entry.refused = true;
  if (failure_) return;
  const std::vector<Parameter>& parameters = entry.bucket->parameters();
  const auto changed = std::find_if(parameters.begin(), parameters.end(),
                                    [&](const Parameter& parameter) { return is_part_of(tensor, parameter); });
  failure_ = lost_change(changed == parameters.end() ? "of bucket " + entry.label : changed->name);
}

void ParameterGatherer::use(size_t bucket) {
  Entry& entry = entries_[bucket];
  if (entry.bucket->sharded()) {
    current_ = bucket;
    entry.last_use = ++uses_;
    trace_.use(bucket);
    if (!trace_.following() && coming_ > 0) {  // prefetched for an order that does not hold
      for (size_t b = 0; b < entries_.size(); ++b) wait(b);
    }
    release_done();
    if (entry.state == State::kReleased) {
      make_room(entry.bucket->layout().numel);
      // Gathers that are under way hold the memory in which slices are read.
      for (size_t b = 0; b < entries_.size() && !entry.bucket->slice_has_room(); ++b) wait(b);
      fetch(bucket);
    }
  }
  wait(bucket);
  prefetch();
}

// Whole, and not of the operator under way, which may read it again in operators that it calls.
bool ParameterGatherer::can_be_released(const Entry& entry) const {
  return entry.state == State::kWhole && entry.bucket->sharded() && entry.held == 0 &&
         entry.used_by != OpInterceptor::outermost_operator();
}

void ParameterGatherer::start_gather(Entry& entry, bool exact) {
  const at::RecordFunctionGuard not_intercepted(/*is_enabled=*/false);
  const ParameterBucket& bucket = *entry.bucket;
  entry.exact = exact || bits_ == 0 || !bucket.sharded();
  if (bucket.secondary().defined() && !exact) {
    entry.work = node_->all_gather(bucket.flat(), bucket.secondary(), entry.label);
    return;
  }
  bucket.load_slice();
  entry.reads_slice = true;
  if (bucket.bits() > 0) {
    entry.work = comm::encoded_all_gather(bucket.flat(), own_slice(bucket), bucket.bits(), communicator_, entry.label);
  } else if (entry.exact && bucket.slice(communicator_.rank()).device() != bucket.flat().device()) {
    gather_from_host(entry, bucket.slice(communicator_.rank()));
  } else if (entry.exact) {
    entry.work = communicator_.all_gather(bucket.flat(), own_slice(bucket), entry.label);
  } else {
    entry.work = comm::quantized_all_gather(bucket.flat(), own_slice(bucket), bits_, communicator_, entry.label);
  }
}

// The slice travels beside what the device computes, which waits for the whole bucket only where it is used.
void ParameterGatherer::gather_from_host(Entry& entry, const at::Tensor& slice) {
  const at::Tensor& whole = entry.bucket->flat();
  if (communicator_.size() == 1) {
    entry.arrived = copies_.copy_of_kept(whole, slice);
    return;
  }
  entry.own = at::empty(slice.sizes(), whole.options());
  entry.arrived = copies_.copy_of_kept(entry.own, slice);
  const c10::OptionalStreamGuard after_copy = copies_.as_current();
  entry.work = communicator_.all_gather(whole, entry.own, entry.label);
}

// Where collectives take it: on the device.
at::Tensor ParameterGatherer::own_slice(const ParameterBucket& bucket) const {
  const at::Tensor slice = bucket.bits() > 0 ? bucket.encoded_slice() : bucket.slice(communicator_.rank());
  return slice.to(bucket.flat().device(), slice.scalar_type(), /*non_blocking=*/true);
}

void ParameterGatherer::fetch(size_t bucket, bool exact) {
  Entry& entry = entries_[bucket];
  const int64_t elements = entry.bucket->layout().numel;
  entry.state = State::kComing;
  live_ += elements;
  coming_ += elements;
  peak_ = std::max(peak_, live_);
  allocate(bucket);
  try {
    start_gather(entry, exact);
  } catch (...) {
    fail(bucket);
  }
}

// An operator cannot be told that its parameters are not there (LibTorch swallows what a callback throws).
void ParameterGatherer::allocate(size_t bucket) {
  ParameterBucket& memory = *entries_[bucket].bucket;
  try {
    memory.allocate(memory_);
    return;
  } catch (const std::exception&) {  // once more, below
  }
  try {
    // With what is free on this rank. No bucket is released for it: other ranks know nothing of this one's memory, and
    // would not take part in the gather that brings the bucket back.
    memory_.clear();
    if (!memory.flat().is_cpu()) at::accelerator::emptyCache();
    memory.allocate(memory_);
  } catch (const std::exception& error) {
    log::error("no memory for ", entries_[bucket].label, ", ", memory.layout().numel, " elements, with ", live_,
               " elements gathered: ", error.what(), ". Reduce zero_optimization.stage3_max_live_parameters (",
               limits_.max_live, ") or the batch");
    std::terminate();
  }
}

void ParameterGatherer::wait(size_t bucket) {
  Entry& entry = entries_[bucket];
  if (entry.state != State::kComing) return;
  entry.state = State::kWhole;
  if (entry.bucket->sharded()) coming_ -= entry.bucket->layout().numel;
  const at::RecordFunctionGuard not_intercepted(/*is_enabled=*/false);
  const bool read_slice = std::exchange(entry.reads_slice, false);
  try {
    copies_.wait_on_device(std::exchange(entry.arrived, {}));
    entry.work.wait();
    // On every rank of the node alike: a gather that failed here fails there.
    if (node_ && entry.bucket->sharded() && !entry.bucket->secondary().defined()) {
      entry.bucket->keep_secondary(node_->rank(), node_->size());
    }
  } catch (...) {
    fail(bucket);
  }
  if (read_slice) entry.bucket->unload_slice(/*changed=*/false);
  entry.work = {};
  entry.own.reset();
  if (entry.bucket->sharded()) note_versions(entry);
}

void ParameterGatherer::note_versions(Entry& entry) {
  entry.refused = false;
  entry.versions.clear();
  for (const Parameter& parameter : entry.bucket->parameters()) entry.versions.push_back(parameter.tensor._version());
}

void ParameterGatherer::fail(size_t bucket) {
  if (!failure_) failure_ = std::current_exception();
  if (!entries_[bucket].bucket->sharded()) return;
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard not_intercepted(/*is_enabled=*/false);
  entries_[bucket].bucket->flat().zero_();
}

void ParameterGatherer::require_unchanged(const Entry& entry) {
  if (entry.refused) return;  // it has been, or will be thrown
  for (size_t i = 0; i < entry.versions.size(); ++i) {
    const Parameter& parameter = entry.bucket->parameters()[i];
    if (parameter.tensor._version() == entry.versions[i] || failure_) continue;
    failure_ = lost_change(parameter.name);
  }
}

void ParameterGatherer::release(size_t bucket) {
  Entry& entry = entries_[bucket];
  ensure(entry.state == State::kWhole && entry.bucket->sharded(), "only a whole, sharded bucket is released");
  require_unchanged(entry);
  entry.state = State::kReleased;
  live_ -= entry.bucket->layout().numel;
  entry.bucket->release(memory_);
}

// Gives back what the pass has done with.
void ParameterGatherer::release_done() {
  for (size_t b = 0; b < entries_.size(); ++b) {
    const Entry& entry = entries_[b];
    if (!can_be_released(entry)) continue;
    const bool stays = trace_.following() ? trace_.distance(b, parameters_stay_) <= limits_.max_reuse_distance
                                          : entry.last_use + kRecentUses > uses_;
    if (!stays) release(b);
  }
}

void ParameterGatherer::release_all() {
  for (size_t b = 0; b < entries_.size(); ++b) {
    wait(b);
    const Entry& entry = entries_[b];
    if (entry.bucket->sharded() && entry.state == State::kWhole && entry.held == 0) release(b);
  }
}

// Gives back what is used last of all, or was used longest ago, until `elements` fit under the limit.
void ParameterGatherer::make_room(int64_t elements) {
  while (live_ + elements > limits_.max_live) {
    size_t victim = entries_.size();
    int64_t furthest = -1;
    for (size_t b = 0; b < entries_.size(); ++b) {
      const Entry& entry = entries_[b];
      if (!can_be_released(entry)) continue;
      const int64_t distance =
          trace_.following() ? trace_.distance(b, parameters_stay_) : static_cast<int64_t>(uses_ - entry.last_use);
      if (distance <= furthest) continue;
      furthest = distance;
      victim = b;
    }
    if (victim == entries_.size()) return;  // the operator's own: it cannot run with less
    release(victim);
  }
}

void ParameterGatherer::prefetch() {
  if (live_ == sharded_) return;
  for (const size_t bucket : trace_.upcoming()) {
    if (coming_ >= limits_.prefetch) break;
    const Entry& entry = entries_[bucket];
    if (entry.state != State::kReleased) continue;
    if (live_ + entry.bucket->layout().numel > limits_.max_live || !entry.bucket->slice_has_room()) break;
    fetch(bucket);
  }
  prefetch_slices();
}

// One gather further: slices that are not in memory are on their way when it starts.
void ParameterGatherer::prefetch_slices() {
  for (const size_t bucket : trace_.upcoming()) {
    const Entry& entry = entries_[bucket];
    if (entry.state != State::kReleased) continue;
    if (!entry.bucket->secondary().defined()) entry.bucket->prefetch_slice();
    return;
  }
}

void ParameterGatherer::rethrow() {
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

// Takes this rank's place in the order of gathers: others that want a bucket now learn that this rank wants none.
void ParameterGatherer::meet(const char* where) {
  rethrow();
  if (communicator_.size() == 1) return;
  met_.wait();
  if (node_) node_->all_reduce(meeting_, comm::ReduceOp::kSum, where).wait();  // gathers may be under way there
  met_ = communicator_.all_reduce(meeting_, comm::ReduceOp::kSum, where);
}

void ParameterGatherer::begin_backward(bool update_follows) {
  parameters_stay_ = !update_follows;
  choose_cast_cache(true);
  meet("start of backward");
  met_.wait();
  in_backward_ = true;
}

void ParameterGatherer::end_backward() {
  in_backward_ = false;
  meet("end of backward");
}

void ParameterGatherer::end_pass() {
  in_backward_ = false;
  trace_.end_pass();
  parameters_stay_ = true;
  current_ = entries_.size();
}

void ParameterGatherer::updated(size_t bucket) {
  Entry& entry = entries_[bucket];
  wait(bucket);
  if (entry.bucket->sharded()) {
    ensure(entry.held == 0, "parameters are not updated while a scope holds them");
    if (entry.state == State::kWhole) release(bucket);
    entry.bucket->drop_secondary();
    return;
  }
  if (communicator_.size() == 1) return;
  entry.state = State::kComing;
  try {
    start_gather(entry);
  } catch (...) {
    entry.state = State::kWhole;
    throw;
  }
}

void ParameterGatherer::end_update() {
  release_all();
  memory_.lend_to_kernel();
  rethrow();
}

void ParameterGatherer::change_mode() {
  in_backward_ = false;
  choose_cast_cache(true);
  trace_.restart();
  memory_.lend_to_kernel();
}

void ParameterGatherer::wait_all() {
  for (size_t b = 0; b < entries_.size(); ++b) wait(b);
  met_.wait();
  rethrow();
}

void ParameterGatherer::gather(size_t bucket) {
  Entry& entry = entries_[bucket];
  wait(bucket);
  if (entry.state == State::kWhole && !entry.exact) release(bucket);
  if (entry.state == State::kReleased) fetch(bucket, /*exact=*/true);
  wait(bucket);
  if (failure_ && entry.bucket->sharded() && entry.state == State::kWhole && entry.held == 0) release(bucket);
  rethrow();
  ++entry.held;
}

void ParameterGatherer::drop(size_t bucket) {
  Entry& entry = entries_[bucket];
  ensure(entry.held > 0, "a bucket is dropped as often as it was gathered");
  if (--entry.held > 0) return;
  if (entry.bucket->sharded() && entry.state == State::kWhole) release(bucket);
  rethrow();
}

void ParameterGatherer::keep_changes(size_t bucket) {
  Entry& entry = entries_[bucket];
  ensure(entry.held > 0 && entry.state == State::kWhole, "only a gathered bucket keeps changes");
  if (!entry.bucket->sharded()) return;
  const at::RecordFunctionGuard not_intercepted(/*is_enabled=*/false);
  entry.bucket->keep_changes(communicator_.rank());
  entry.bucket->drop_secondary();
  note_versions(entry);
}

void ParameterGatherer::release_memory() {
  release_all();
  memory_.clear();
  rethrow();
}

int64_t ParameterGatherer::take_peak_elements() { return std::exchange(peak_, live_); }

}  // namespace ds::zero
