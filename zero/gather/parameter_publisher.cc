#include "zero/gather/parameter_publisher.h"

#include <ATen/core/grad_mode.h>

#include "core/check.h"
#include "core/log.h"
#include "core/without_stack.h"
#include "zero/row_gather.h"

namespace ds::zero {

ParameterPublisher::ParameterPublisher(std::vector<ParameterBucket>& buckets, comm::Communicator& communicator,
                                       bool partitioned)
    : buckets_(buckets),
      communicator_(communicator),
      partitioned_(partitioned && communicator.size() > 1),
      works_(buckets.size()),
      pending_(buckets.size(), false),
      interceptor_([this](const at::Tensor& tensor) { before_read(tensor); }) {
  if (!partitioned_) return;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    bucket_of_storage_.emplace(buckets_[b].flat().storage().unsafeGetStorageImpl(), b);
    bucket_of_storage_.emplace(buckets_[b].storage().coming_storage().unsafeGetStorageImpl(), b);
  }
}

ParameterPublisher::~ParameterPublisher() {
  try {
    wait_all();
  } catch (const std::exception& error) {
    log::warning("parameters are incomplete: ", without_stack(error.what()));
  }
}

void ParameterPublisher::updated(size_t bucket) {
  if (!partitioned_) return;
  ensure(!pending_.at(bucket), "a bucket is published once per step");
  ParameterBucket& parameters = buckets_.at(bucket);
  works_[bucket] = communicator_.all_gather(parameters.flat(), parameters.slice(communicator_.rank()),
                                            cat("parameters of bucket ", bucket));
  parameters.storage().begin_arrival();
  pending_[bucket] = true;
  ++pending_count_;
  interceptor_.enable();
}

void ParameterPublisher::updated_rows(size_t bucket, const at::Tensor& rows) {
  if (!partitioned_) return;
  const at::NoGradGuard no_grad;
  ensure(!pending_.at(bucket), "a bucket is published once per step");
  const BucketLayout& layout = buckets_.at(bucket).layout();
  const at::Tensor table = buckets_[bucket].flat().view({-1, layout.row_width});
  const at::Tensor own = rows.add(communicator_.rank() * (layout.slice_numel / layout.row_width));
  RowGather gather;
  gather.start(communicator_, {.rows = own, .values = table.index_select(0, own)}, cat("rows of bucket ", bucket));
  const TableRows all = gather.finish();
  table.index_copy_(0, all.rows, all.values);
}

void ParameterPublisher::use_from_this_thread() {
  interceptor_.disable();
  if (pending_count_ > 0) interceptor_.enable();  // else with the next update
}

void ParameterPublisher::before_read(const at::Tensor& tensor) {
  const auto found = bucket_of_storage_.find(tensor.storage().unsafeGetStorageImpl());
  if (found == bucket_of_storage_.end()) return;
  if (pending_[found->second]) wait(found->second);
  buckets_[found->second].storage().show(tensor);
}

void ParameterPublisher::wait(size_t bucket) {
  pending_[bucket] = false;
  --pending_count_;
  try {
    works_[bucket].wait();
  } catch (...) {
    if (!failure_) failure_ = std::current_exception();
  }
  works_[bucket] = {};
  buckets_[bucket].storage().end_arrival();
}

void ParameterPublisher::wait_all() {
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    if (pending_[bucket]) wait(bucket);
  }
  interceptor_.disable();
  if (failure_) std::rethrow_exception(failure_);
}

}  // namespace ds::zero
