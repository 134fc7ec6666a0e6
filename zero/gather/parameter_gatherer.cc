#include "zero/gather/parameter_gatherer.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <exception>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "core/memory/storage_memory.h"

namespace ds::zero {
namespace {

std::vector<int64_t> elements_of(const std::vector<ParameterBucket*>& buckets) {
  std::vector<int64_t> elements;
  for (const ParameterBucket* bucket : buckets) elements.push_back(bucket->layout().numel);
  return elements;
}

}  // namespace

ParameterGatherer::ParameterGatherer(const std::vector<ParameterBucket*>& buckets, GatherRoutes routes,
                                     GatherLimits limits)
    : buckets_(buckets, routes, limits.max_live),
      communicator_(routes.slices),
      node_(routes.node),
      limits_(limits),
      reuse_(elements_of(buckets), limits.max_reuse_distance),
      end_text_(
          "the end of its engine: at stage 3 ranks had slices of it, which have gone with the engine. Take "
          "engine->module_state_dict() before"),
      current_(buckets.size()),
      meeting_(at::zeros({1}, buckets.at(0)->flat().options())),
      interceptor_([this](const at::Tensor& tensor) { before_read(tensor); }) {
  for (size_t b = 0; b < buckets.size(); ++b) {
    bucket_of_storage_.emplace(buckets[b]->flat().storage().unsafeGetStorageImpl(), b);
    if (buckets[b]->sharded())
      bucket_of_storage_.emplace(buckets[b]->storage().released_storage().unsafeGetStorageImpl(), b);
  }
  if (!sees_operators()) return;
  require(at::isRecordFunctionEnabled(),
          "stage 3 sees operators through at::RecordFunction, which is disabled on this ",
          "thread; call at::enableRecordFunction(true) before initialize");
  interceptor_.enable();
}

bool ParameterGatherer::sees_operators() const { return communicator_.size() > 1 || buckets_.sharded_elements() > 0; }

ParameterGatherer::~ParameterGatherer() {
  choose_cast_cache(true);
  try {
    wait_all();
  } catch (const std::exception& error) {
    log::warning("gathering parameters failed: ", error.what());
  }
  for (const LiveBuckets::Entry& entry : buckets_) {
    if (!entry.sharded()) continue;
    entry.bucket->storage().end(
        cat("parameter ", entry.bucket->parameters().front().name, " or one beside it was read after ", end_text_));
  }
}

void ParameterGatherer::use_from_this_thread() {
  interceptor_.disable();  // which the end of its thread may have done
  if (sees_operators()) interceptor_.enable();
  cast_cache_off_ = false;  // it was that of the other thread
}

void ParameterGatherer::before_read(const at::Tensor& tensor) {
  const auto found = bucket_of_storage_.find(tensor.storage().unsafeGetStorageImpl());
  if (found == bucket_of_storage_.end()) return;
  const size_t bucket = found->second;
  LiveBuckets::Entry& entry = buckets_[bucket];
  if (entry.sharded() && !in_backward_) choose_cast_cache(at::GradMode::is_enabled());
  if (entry.whole() && !entry.sharded()) return;
  if (entry.whole() && entry.held > 0) return entry.bucket->storage().show(tensor);
  // An operator may read a bucket as often as its data say, a recurrent one once for each step in time, which differ
  // between ranks: the order of uses, which all ranks must have, counts it once.
  const uint64_t used_before_by = std::exchange(entry.used_by, OpInterceptor::outermost_operator());
  const bool same_operator = used_before_by == entry.used_by;
  if (!entry.whole() || (bucket != current_ && !same_operator)) use(bucket);
  if (!entry.sharded()) return;
  if (!entry.whole()) {  // there was no memory
    if (!is_same_storage(tensor.storage(), entry.bucket->storage().released_storage())) take_elements(tensor);
    return;
  }
  entry.bucket->storage().show(tensor);
  if (entry.held == 0 && OpInterceptor::changes_tensor()) entry.changes.note();
}

// Turns the cast cache of this thread on or off. It is left alone where somebody else has turned it off.
void ParameterGatherer::choose_cast_cache(bool on) {
  const bool stays = on ? !cast_cache_off_ : !at::autocast::is_autocast_cache_enabled();
  if (stays) return;
  at::autocast::set_autocast_cache_enabled(on);
  cast_cache_off_ = !on;
}

void ParameterGatherer::use(size_t bucket) {
  LiveBuckets::Entry& entry = buckets_[bucket];
  if (!in_backward_) entry.waits = false;
  entry.named = false;
  if (entry.sharded()) {
    current_ = bucket;
    reuse_.use(bucket);
    // Prefetched for an order that does not hold.
    if (!reuse_.following() && buckets_.coming_elements() > 0) buckets_.wait_all();
    release_done();
    if (entry.released()) {
      make_room(entry.elements());
      // Gathers that are under way hold the memory in which slices are read.
      for (size_t b = 0; b < buckets_.size() && !entry.bucket->kept_slice().has_room(); ++b) buckets_.wait(b);
      buckets_.fetch(bucket);
    }
  }
  buckets_.wait(bucket);
  prefetch();
}

// Whether the bucket is full and is not used by the operator under way, which may read it again in operators that it
// calls.
bool ParameterGatherer::can_be_released(size_t bucket) const {
  const LiveBuckets::Entry& entry = buckets_[bucket];
  return entry.whole() && entry.sharded() && entry.held == 0 && entry.used_by != OpInterceptor::outermost_operator();
}

// Releases the buckets that the pass has done with.
void ParameterGatherer::release_done() {
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const LiveBuckets::Entry& entry = buckets_[b];
    const bool kept = entry.stays || entry.waits || entry.named;
    if (can_be_released(b) && !kept && !reuse_.stays(b)) buckets_.release(b);
  }
}

// Releases the bucket that is used last of all, or was used longest ago, until `elements` fit under the limit.
void ParameterGatherer::make_room(int64_t elements) {
  while (buckets_.live_elements() + elements > limits_.max_live) {
    size_t victim = buckets_.size();
    int64_t furthest = -1;
    for (size_t b = 0; b < buckets_.size(); ++b) {
      if (!can_be_released(b)) continue;
      const int64_t distance = reuse_.distance(b);
      if (distance <= furthest) continue;
      furthest = distance;
      victim = b;
    }
    if (victim == buckets_.size()) return;  // the operator's own: it cannot run with less
    buckets_.release(victim);
  }
}

// Prefetches the buckets that the program has named to follow the one in use. Returns whether it has named any.
bool ParameterGatherer::prefetch_named() {
  if (current_ == buckets_.size()) return false;
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  const PrefetchRules::Named& named = in_backward ? rules_.backward : rules_.forward;
  const auto found = named.find(current_);
  if (found == named.end()) return in_backward && !rules_.in_backward;
  for (const size_t bucket : found->second) {
    if (!buckets_[bucket].released()) continue;
    buckets_.fetch(bucket);
    buckets_[bucket].named = true;
  }
  return true;
}

void ParameterGatherer::prefetch() {
  if (buckets_.live_elements() == buckets_.sharded_elements() || prefetch_named()) return;
  for (const size_t bucket : reuse_.upcoming()) {
    if (buckets_.coming_elements() >= limits_.prefetch || buckets_.out_of_memory()) break;
    const LiveBuckets::Entry& entry = buckets_[bucket];
    if (!entry.released()) continue;
    if (buckets_.live_elements() + entry.elements() > limits_.max_live || !entry.bucket->kept_slice().has_room()) break;
    buckets_.fetch(bucket);
  }
  if (!buckets_.out_of_memory()) prefetch_slices();
}

// Prefetches the slice of the next bucket, so that it is in memory when its gather starts.
void ParameterGatherer::prefetch_slices() {
  for (const size_t bucket : reuse_.upcoming()) {
    const LiveBuckets::Entry& entry = buckets_[bucket];
    if (!entry.released()) continue;
    if (!entry.bucket->secondary().defined()) entry.bucket->kept_slice().prefetch();
    return;
  }
}

// Takes this rank's place in the order of gathers: others that want a bucket now learn that this rank wants none.
void ParameterGatherer::meet(const char* where) {
  buckets_.rethrow();
  if (communicator_.size() == 1) return;
  wait_for_others();
  if (node_) node_->all_reduce(meeting_, comm::ReduceOp::kSum, where).wait();  // gathers may be under way there
  met_ = communicator_.all_reduce(meeting_, comm::ReduceOp::kSum, where);
}

void ParameterGatherer::wait_for_others() {
  try {
    met_.wait();
  } catch (...) {
    std::rethrow_exception(add_advice(std::current_exception()));
  }
}

void ParameterGatherer::begin_backward(bool update_follows) {
  reuse_.expect_update(update_follows);
  choose_cast_cache(true);
  if (meets_in_every_pass() || update_follows) {
    meet("start of backward");
    wait_for_others();
  } else {
    buckets_.rethrow();
  }
  in_backward_ = true;
}

void ParameterGatherer::end_backward() {
  in_backward_ = false;
  if (!meets_in_every_pass()) return buckets_.rethrow();
  meet("end of backward");
}

void ParameterGatherer::end_pass() {
  in_backward_ = false;
  reuse_.end_pass();
  current_ = buckets_.size();
}

void ParameterGatherer::updated(size_t bucket) {
  const LiveBuckets::Entry& entry = buckets_[bucket];
  buckets_.wait(bucket);
  if (entry.sharded()) {
    ensure(entry.held == 0, "parameters are not updated while a scope holds them");
    if (entry.whole()) buckets_.release(bucket);
    entry.bucket->drop_secondary();
  } else if (communicator_.size() > 1) {
    buckets_.refresh(bucket);
  }
}

void ParameterGatherer::end_update() {
  buckets_.release_all();
  buckets_.lend_memory();
  buckets_.rethrow();
}

void ParameterGatherer::change_mode() {
  in_backward_ = false;
  choose_cast_cache(true);
  reuse_.restart();
  buckets_.lend_memory();
}

void ParameterGatherer::wait_all() {
  buckets_.wait_all();
  wait_for_others();
  buckets_.rethrow();
}

void ParameterGatherer::gather(size_t bucket) {
  LiveBuckets::Entry& entry = buckets_[bucket];
  buckets_.wait(bucket);
  if (entry.whole() && !entry.exact) buckets_.release(bucket);
  if (entry.released()) buckets_.fetch(bucket, /*exact=*/true);
  buckets_.wait(bucket);
  if (buckets_.failed() && entry.sharded() && entry.whole() && entry.held == 0) buckets_.release(bucket);
  buckets_.rethrow();
  ++entry.held;
}

void ParameterGatherer::drop(size_t bucket) {
  LiveBuckets::Entry& entry = buckets_[bucket];
  ensure(entry.held > 0, "a bucket is dropped as often as it was gathered");
  if (--entry.held > 0) return;
  if (entry.sharded() && entry.whole()) buckets_.release(bucket);
  buckets_.rethrow();
}

void ParameterGatherer::keep_changes(size_t bucket) {
  LiveBuckets::Entry& entry = buckets_[bucket];
  ensure(entry.held > 0 && entry.whole(), "only a gathered bucket keeps changes");
  if (!entry.sharded()) return;
  const at::RecordFunctionGuard not_intercepted(/*is_enabled=*/false);
  entry.bucket->keep_changes(communicator_.rank());
  entry.bucket->drop_secondary();
  entry.changes.begin(*entry.bucket);
}

void ParameterGatherer::reshard(size_t bucket) {
  LiveBuckets::Entry& entry = buckets_[bucket];
  entry.waits = false;
  entry.named = false;
  if (!entry.sharded()) return;
  buckets_.wait(bucket);
  if (entry.whole() && entry.held == 0) buckets_.release(bucket);
  entry.bucket->drop_secondary();
}

std::vector<ChangedBucket> ParameterGatherer::take_changed() {
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const LiveBuckets::Entry& entry = buckets_[b];
    const bool releases = entry.whole() && entry.sharded() && entry.held == 0;
    if (releases && entry.changes.found(*entry.bucket)) buckets_.release(b);
  }
  return buckets_.take_changed();
}

void ParameterGatherer::release_memory() {
  buckets_.release_all();
  buckets_.free_memory();
  buckets_.rethrow();
}

int64_t ParameterGatherer::take_peak_elements() { return buckets_.take_peak_elements(); }

}  // namespace ds::zero
