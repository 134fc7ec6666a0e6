#include "zero/gather/bucket_gather.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <exception>
#include <utility>

#include "comm/quantized_collectives.h"

namespace ds::zero {

void BucketGather::start(const ParameterBucket& bucket, const std::string& label, bool exact, GatherUnderWay& gather) {
  if (bucket.secondary().defined() && !exact) {
    gather.work = routes_.node->all_gather(bucket.flat(), bucket.secondary(), label);
    return;
  }
  comm::Communicator& slices = routes_.slices;
  gather.slice = bucket.sharded() ? bucket.kept_slice().begin_gather() : bucket.slice(slices.rank());
  if (bucket.kept_slice().bits() > 0) {
    gather.work =
        comm::encoded_all_gather(bucket.flat(), on_device(bucket, gather), bucket.kept_slice().bits(), slices, label);
  } else if (!is_exact(bucket, exact) && routes_.bits == 0) {
    start_cast(bucket, label, gather);
  } else if (!is_exact(bucket, exact)) {
    gather.work = comm::quantized_all_gather(bucket.flat(), on_device(bucket, gather), routes_.bits, slices, label);
  } else if (gather.slice.device() != bucket.flat().device()) {
    start_from_host(bucket, label, gather);
  } else {
    gather.work = slices.all_gather(bucket.flat(), on_device(bucket, gather), label);
  }
}

// wait() puts what has come into the bucket.
void BucketGather::start_cast(const ParameterBucket& bucket, const std::string& label, GatherUnderWay& gather) {
  const at::NoGradGuard no_grad;
  gather.own = on_device(bucket, gather).to(static_cast<at::ScalarType>(*bucket.layout().sent_as));
  gather.sent = at::empty(bucket.flat().sizes(), gather.own.options());
  gather.work = routes_.slices.all_gather(gather.sent, gather.own, label);
}

// The slice travels beside what the device computes, which waits for the full bucket only where it is used.
void BucketGather::start_from_host(const ParameterBucket& bucket, const std::string& label, GatherUnderWay& gather) {
  const at::Tensor& slice = gather.slice;
  const at::Tensor& whole = bucket.flat();
  if (routes_.slices.size() == 1) {
    gather.arrived = copies_.copy_of_kept(whole, slice);
    return;
  }
  gather.own = at::empty(slice.sizes(), whole.options());
  gather.arrived = copies_.copy_of_kept(gather.own, slice);
  const c10::OptionalStreamGuard after_copy = copies_.as_current();
  gather.work = routes_.slices.all_gather(whole, gather.own, label);
}

at::Tensor BucketGather::on_device(const ParameterBucket& bucket, const GatherUnderWay& gather) {
  return gather.slice.to(bucket.flat().device(), gather.slice.scalar_type(), /*non_blocking=*/true);
}

void BucketGather::wait(ParameterBucket& bucket, GatherUnderWay& gather) {
  std::exception_ptr failure;
  try {
    copies_.wait_on_device(std::exchange(gather.arrived, {}));
    gather.work.wait();
    if (gather.sent.defined()) {
      const at::NoGradGuard no_grad;
      bucket.flat().copy_(gather.sent);
    }
    // On every rank of the node alike: a gather that failed here fails there.
    if (routes_.node && bucket.sharded() && !bucket.secondary().defined()) {
      bucket.keep_secondary(routes_.node->rank(), routes_.node->size());
    }
  } catch (...) {
    failure = std::current_exception();
  }
  if (gather.slice.defined()) bucket.kept_slice().end_gather();
  gather = {};
  if (failure) std::rethrow_exception(failure);
}

}  // namespace ds::zero
