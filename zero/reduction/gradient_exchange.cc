#include "zero/reduction/gradient_exchange.h"

#include <string>

#include "core/text.h"

namespace ds::zero {

BucketGroups GradientExchange::groups_of(size_t bucket) const {
  const bool instead = routes_.reduction != nullptr && routes_.reduction->takes(bucket);
  return {.slices = routes_.slices, .replicas = routes_.replicas, .instead = instead ? routes_.reduction : nullptr};
}

at::Tensor GradientExchange::own_part(size_t bucket, const at::Tensor& flat) const {
  const comm::Communicator& slices = groups_of(bucket).slices;
  if (options_.policy == ReductionPolicy::kAllReduce || slices.size() == 1 || local_) return flat;
  const int64_t length = flat.numel() / slices.size();
  return flat.narrow(0, slices.rank() * length, length);
}

bool GradientExchange::makes_copies() const {
  return routes_.reduction != nullptr || options_.communication_dtype != options_.gradient_dtype ||
         !options_.bucket_dtypes.empty();
}

void GradientExchange::start(size_t bucket, const at::Tensor& local, GradientTransfer& transfer) const {
  const BucketGroups groups = groups_of(bucket);
  const int world = groups.slices.size();
  if (world == 1 || local_) return;
  at::Tensor& wire = transfer.wire;
  const at::ScalarType dtype = groups.instead ? options_.communication_dtype : options_.dtype_sent(bucket);
  wire = dtype == at::ScalarType::Undefined ? local : local.to(dtype);
  auto op = comm::ReduceOp::kSum;
  if (options_.average && options_.prescale) {
    wire.div_(world);
  } else if (divides_in_two()) {
    wire.div_(options_.predivide_factor);
  } else if (options_.average && !divides_after(bucket, wire)) {
    op = comm::ReduceOp::kAvg;
  }
  const std::string label = cat("gradients of bucket ", bucket);
  if (groups.instead) {
    transfer.work = groups.instead->start(bucket, own_part(bucket, wire), wire, op, label);
  } else if (options_.policy == ReductionPolicy::kAllReduce) {
    transfer.work = groups.slices.all_reduce(wire, op, label);
  } else {
    transfer.work = groups.slices.reduce_scatter(own_part(bucket, wire), wire, op, label);
  }
}

void GradientExchange::finish(size_t bucket, const at::Tensor& local, GradientTransfer& transfer) const {
  transfer.work.wait();
  transfer.work = {};
  if (!transfer.wire.defined()) return;
  const at::Tensor sent = own_part(bucket, transfer.wire);
  // Before the copy: the sum may be beyond what a narrower gradient_dtype holds.
  if (divides_in_two()) at::Tensor(sent).mul_(options_.predivide_factor / groups_of(bucket).slices.size());
  if (divides_after(bucket, transfer.wire)) at::Tensor(sent).div_(groups_of(bucket).slices.size());
  if (!transfer.wire.is_same(local)) own_part(bucket, local).copy_(sent);
  transfer.wire.reset();
}

}  // namespace ds::zero
