#include "zero/parameter_publisher.h"

#include "core/check.h"
#include "core/log.h"

namespace ds::zero {

ParameterPublisher::ParameterPublisher(const std::vector<ParameterBucket>& buckets, comm::Communicator& communicator,
                                       bool partitioned)
    : buckets_(buckets),
      communicator_(communicator),
      partitioned_(partitioned && communicator.size() > 1),
      works_(buckets.size()),
      pending_(buckets.size(), false),
      interceptor_([this](const at::Tensor& tensor) { before_read(tensor); }) {}

ParameterPublisher::~ParameterPublisher() {
  try {
    wait_all();
  } catch (const std::exception& error) {
    log::warning("parameters are incomplete: ", error.what());
  }
}

void ParameterPublisher::updated(size_t bucket) {
  if (!partitioned_) return;
  ensure(!pending_.at(bucket), "a bucket is published once per step");
  const ParameterBucket& parameters = buckets_.at(bucket);
  works_[bucket] = communicator_.all_gather(parameters.flat(), parameters.slice(communicator_.rank()),
                                            cat("parameters of bucket ", bucket));
  pending_[bucket] = true;
  ++pending_count_;
  interceptor_.enable();
}

void ParameterPublisher::use_from_this_thread() {
  interceptor_.disable();
  if (pending_count_ > 0) interceptor_.enable();  // else with the next update
}

void ParameterPublisher::before_read(const at::Tensor& tensor) {
  if (pending_count_ == 0) return;
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    if (pending_[bucket] && buckets_[bucket].flat().is_alias_of(tensor)) wait(bucket);
  }
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
}

void ParameterPublisher::wait_all() {
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    if (pending_[bucket]) wait(bucket);
  }
  interceptor_.disable();
  if (failure_) std::rethrow_exception(failure_);
}

}  // namespace ds::zero
