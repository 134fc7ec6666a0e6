#include "zero/gather/parameter_gatherer.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>

#include <exception>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "core/memory/storage_memory.h"
#include "core/without_stack.h"
#include "zero/gather/gather_errors.h"
#include "zero/gather/row_reads.h"

namespace ds::zero {

void CastCache::choose(bool on) {
  const bool stays = on ? !turned_off_ : !at::autocast::is_autocast_cache_enabled();
  if (stays) return;
  at::autocast::set_autocast_cache_enabled(on);
  turned_off_ = !on;
}

RankMeeting::RankMeeting(const GatherRoutes& routes, const at::TensorOptions& options)
    : ranks_(routes.slices), node_(routes.node), sent_(at::zeros({1}, options)) {}

void RankMeeting::begin(const char* where) {
  if (ranks_.size() == 1) return;
  wait();
  if (node_) node_->all_reduce(sent_, comm::ReduceOp::kSum, where).wait();  // gathers may be under way there
  met_ = ranks_.all_reduce(sent_, comm::ReduceOp::kSum, where);
}

void RankMeeting::wait() {
  try {
    met_.wait();
  } catch (...) {
    std::rethrow_exception(add_advice(std::current_exception()));
  }
}

ParameterGatherer::ParameterGatherer(const std::vector<ParameterBucket*>& buckets, GatherRoutes routes,
                                     GatherLimits limits, std::string end_text)
    : buckets_(buckets, routes, limits.max_live),
      held_(buckets_, routes.slices.rank()),
      schedule_(buckets_, limits),
      communicator_(routes.slices),
      sees_operators_(communicator_.size() > 1 || buckets_.counts().sharded > 0),
      end_text_(std::move(end_text)),
      meeting_(routes, buckets.at(0)->flat().options()),
      interceptor_([this](const at::Tensor& tensor) { before_read(tensor); }) {
  for (size_t b = 0; b < buckets.size(); ++b) {
    bucket_of_storage_.emplace(buckets[b]->flat().storage().unsafeGetStorageImpl(), b);
    if (!buckets[b]->sharded()) continue;
    bucket_of_storage_.emplace(buckets[b]->storage().released_storage().unsafeGetStorageImpl(), b);
    if (buckets_[b].is_read_by_rows()) buckets[b]->storage().tell_when_released(RowReads::kReleased);
  }
  if (!sees_operators_) return;
  require(at::isRecordFunctionEnabled(),
          "stage 3 sees operators through at::RecordFunction, which is disabled on this ",
          "thread; call at::enableRecordFunction(true) before initialize");
  interceptor_.enable();
}

ParameterGatherer::~ParameterGatherer() {
  cast_cache_.choose(true);
  try {
    wait_all();
  } catch (const std::exception& error) {
    log::warning("gathering parameters failed: ", without_stack(error.what()));
  }
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const LiveBuckets::Entry& entry = buckets_[b];
    if (!entry.sharded()) continue;
    entry.bucket->storage().end(
        cat("parameter ", entry.bucket->parameters().front().name, " or one beside it was read after ", end_text_));
  }
}

void ParameterGatherer::use_from_this_thread() {
  interceptor_.disable();  // which the end of its thread may have done
  if (sees_operators_) interceptor_.enable();
  cast_cache_ = {};  // it was that of the other thread
}

void ParameterGatherer::before_read(const at::Tensor& tensor) {
  const auto found = bucket_of_storage_.find(tensor.storage().unsafeGetStorageImpl());
  if (found == bucket_of_storage_.end()) return;
  const size_t bucket = found->second;
  LiveBuckets::Entry& entry = buckets_[bucket];
  if (entry.is_read_by_rows() && is_same_storage(tensor.storage(), entry.bucket->storage().released_storage())) return;
  if (entry.sharded() && !in_backward_) cast_cache_.choose(at::GradMode::is_enabled());
  if (entry.whole() && !entry.sharded()) return;
  if (entry.whole() && entry.held > 0) return entry.bucket->storage().show(tensor);
  // An operator may read a bucket as often as its data say, a recurrent one once for each step in time, which differ
  // between ranks: the order of uses, which all ranks must have, counts it once.
  const uint64_t used_before_by = std::exchange(entry.used_by, OpInterceptor::outermost_operator());
  const bool same_operator = used_before_by == entry.used_by;
  if (!entry.whole() || (!schedule_.used_last(bucket) && !same_operator)) {
    if (!in_backward_) entry.waits = false;
    schedule_.use(bucket);
  }
  if (!entry.sharded()) return;
  if (!entry.whole()) {  // there was no memory
    if (!is_same_storage(tensor.storage(), entry.bucket->storage().released_storage())) take_elements(tensor);
    return;
  }
  entry.bucket->storage().show(tensor);
  if (entry.held == 0 && OpInterceptor::changes_tensor()) entry.changes.note();
}

void ParameterGatherer::begin_backward(bool update_follows) {
  schedule_.expect_update(update_follows);
  cast_cache_.choose(true);
  buckets_.errors().rethrow();
  if (meeting_.is_in_every_pass() || update_follows) {
    meeting_.begin("start of backward");
    meeting_.wait();
  }
  in_backward_ = true;
}

void ParameterGatherer::end_backward() {
  in_backward_ = false;
  buckets_.errors().rethrow();
  if (meeting_.is_in_every_pass()) meeting_.begin("end of backward");
}

void ParameterGatherer::end_pass() {
  in_backward_ = false;
  schedule_.end_pass();
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
  buckets_.errors().rethrow();
}

void ParameterGatherer::change_mode() {
  in_backward_ = false;
  cast_cache_.choose(true);
  schedule_.restart();
  buckets_.lend_memory();
}

void ParameterGatherer::wait_all() {
  buckets_.wait_all();
  meeting_.wait();
  buckets_.errors().rethrow();
}

void ParameterGatherer::reshard(size_t bucket) {
  LiveBuckets::Entry& entry = buckets_[bucket];
  entry.waits = false;
  entry.named = false;
  if (!entry.sharded()) return;
  buckets_.wait(bucket);
  if (entry.can_be_released()) buckets_.release(bucket);
  entry.bucket->drop_secondary();
}

std::vector<ChangedBucket> ParameterGatherer::take_changed() {
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const LiveBuckets::Entry& entry = buckets_[b];
    if (entry.can_be_released() && entry.changes.found(*entry.bucket)) buckets_.release(b);
  }
  return buckets_.changes().take();
}

void ParameterGatherer::release_memory() {
  buckets_.release_all();
  buckets_.free_memory();
  buckets_.errors().rethrow();
}

}  // namespace ds::zero
