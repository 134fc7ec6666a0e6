#include "zero/reduction/gradient_exchange.h"

#include <string>

#include "core/text.h"

namespace ds::zero {

BucketGroups GradientExchange::groups_of(size_t /*bucket*/) const {
  return {.shards = routes_.slices, .replicas = routes_.replicas};
}

comm::BucketReduction* GradientExchange::replacement_of(size_t bucket) const {
  return routes_.reduction != nullptr && routes_.reduction->takes(bucket) ? routes_.reduction : nullptr;
}

ReducedGradients* GradientExchange::elsewhere_of(size_t bucket) const {
  return routes_.elsewhere != nullptr && routes_.elsewhere->takes(bucket) ? routes_.elsewhere : nullptr;
}

at::Tensor GradientExchange::own_part(size_t bucket, const at::Tensor& flat) const {
  const comm::Communicator& shards = groups_of(bucket).shards;
  if (options_.policy == ReductionPolicy::kAllReduce || shards.size() == 1 || local_) return flat;
  const int64_t length = flat.numel() / shards.size();
  return flat.narrow(0, shards.rank() * length, length);
}

Divisors GradientExchange::divisors(size_t bucket) const {
  const double ranks = groups_of(bucket).shards.size();
  if (!options_.average) return {};
  if (options_.prescale) return {.before = ranks};
  return {.before = options_.predivide_factor, .after = ranks / options_.predivide_factor};
}

bool GradientExchange::makes_copies() const {
  return routes_.reduction != nullptr || options_.communication_dtype != options_.gradient_dtype ||
         !options_.bucket_dtypes.empty();
}

void GradientExchange::start(size_t bucket, const at::Tensor& local, GradientTransfer& transfer) const {
  comm::Communicator& shards = groups_of(bucket).shards;
  comm::BucketReduction* const replacement = replacement_of(bucket);
  const int world = shards.size();
  if (world == 1 || local_) return;
  at::Tensor& wire = transfer.wire;
  const at::ScalarType dtype = replacement ? options_.communication_dtype : options_.dtype_sent(bucket);
  wire = dtype == at::ScalarType::Undefined ? local : local.to(dtype);
  auto op = comm::ReduceOp::kSum;
  if (const double before = divisors(bucket).before; before != 1.0) {
    wire.div_(before);
  } else if (options_.average && !divides_after(bucket, wire)) {
    op = comm::ReduceOp::kAvg;
  }
  const std::string label = cat("gradients of bucket ", bucket);
  if (replacement) {
    transfer.work = replacement->start(bucket, own_part(bucket, wire), wire, op, label);
  } else if (options_.policy == ReductionPolicy::kAllReduce) {
    transfer.work = shards.all_reduce(wire, op, label);
  } else {
    transfer.work = shards.reduce_scatter(own_part(bucket, wire), wire, op, label);
  }
}

void GradientExchange::finish(size_t bucket, const at::Tensor& local, GradientTransfer& transfer) const {
  transfer.work.wait();
  transfer.work = {};
  if (!transfer.wire.defined()) return;
  const at::Tensor sent = own_part(bucket, transfer.wire);
  // Before the copy: the sum may be beyond what a narrower gradient_dtype holds.
  if (divides_in_two()) at::Tensor(sent).mul_(options_.predivide_factor / groups_of(bucket).shards.size());
  if (divides_after(bucket, transfer.wire)) at::Tensor(sent).div_(groups_of(bucket).shards.size());
  if (!transfer.wire.is_same(local)) own_part(bucket, local).copy_(sent);
  transfer.wire.reset();
}

}  // namespace ds::zero
