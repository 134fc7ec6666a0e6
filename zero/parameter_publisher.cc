#include "zero/parameter_publisher.h"

#include "core/check.h"

namespace ds::zero {

ParameterPublisher::ParameterPublisher(const std::vector<ParameterBucket>& buckets, comm::Communicator& communicator)
    : buckets_(buckets),
      communicator_(communicator),
      works_(buckets.size()),
      pending_(buckets.size(), false),
      interceptor_([this](const at::Tensor& tensor) { before_read(tensor); }) {}

ParameterPublisher::~ParameterPublisher() { interceptor_.disable(); }

void ParameterPublisher::publish(size_t bucket) {
  if (communicator_.size() == 1) return;
  ensure(!pending_.at(bucket), "a bucket is published once per step");
  const ParameterBucket& parameters = buckets_.at(bucket);
  works_[bucket] = communicator_.all_gather(parameters.flat(), parameters.slice(communicator_.rank()),
                                            cat("parameters of bucket ", bucket));
  pending_[bucket] = true;
  ++pending_count_;
  interceptor_.enable();
}

void ParameterPublisher::before_read(const at::Tensor& tensor) {
  if (pending_count_ == 0) return;
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    if (!pending_[bucket] || !buckets_[bucket].flat().is_alias_of(tensor)) continue;
    pending_[bucket] = false;
    --pending_count_;
    works_[bucket].wait();
    works_[bucket] = {};
  }
}

void ParameterPublisher::wait_all() {
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    if (!pending_[bucket]) continue;
    pending_[bucket] = false;
    --pending_count_;
    works_[bucket].wait();
    works_[bucket] = {};
  }
  interceptor_.disable();
}

}  // namespace ds::zero
