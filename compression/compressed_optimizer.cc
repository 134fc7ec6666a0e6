#include "compression/compressed_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "core/check.h"
#include "core/slices/segment_gaps.h"
#include "core/tensor_check.h"
#include "optim/chunked_update.h"

namespace ds::compression {

using optimizers::KernelMemory;

CompressedOptimizer::CompressedOptimizer(std::vector<optimizers::GroupOptions> groups, comm::Communicator& communicator)
    : CopyingOptimizer(std::move(groups)), communicator_(communicator) {}

std::string CompressedOptimizer::label(const char* what, int64_t index) const {
  return cat(what, " of bucket ", index);
}

void CompressedOptimizer::allocate_states(int64_t index) {
  const optimizers::Slice& own = slice(index);
  require(optimizers::state_type(own.master.scalar_type()) == at::kFloat, name(), ": expected parameters of float32, ",
          "bfloat16 or float16, found ", describe(own.master));
  require(own.exchange->size() == 1 || own.exchange->size() == communicator_.size(), name(),
          ": expected slices of whole buckets, or of ", communicator_.size(), " ranks, found ", own.exchange->size());
  allocate_slice_states(index);
  Exchange exchange;
  if (!alone()) {
    std::vector<ScaleRange> ranges;
    for (const Segment& segment : own.bucket_segments) ranges.push_back({segment.slice_offset, segment.length});
    const int64_t numel = own.master.numel() * own.exchange->size();
    exchange.all_reduce =
        std::make_unique<CompressedAllReduce>(communicator_, std::move(ranges), numel, own.master.device());
    const auto options = own.master.options().dtype(at::kFloat).requires_grad(false);
    exchange.worker_error = at::zeros({numel}, options);
    exchange.server_error = at::zeros({exchange.all_reduce->own_numel()}, options);
    ensure(!is_part(index) || exchange.all_reduce->own_numel() == own.master.numel(), "a part is a slice");
  }
  exchanges_.push_back(std::move(exchange));
}

void CompressedOptimizer::update_into(int64_t index, const at::Tensor& gradient, double gradient_scale,
                                      const at::Tensor& copy) {
  const at::NoGradGuard no_grad;
  if (is_local(step_count_)) {
    require(index >= 0 && index < slice_count() && step_count_ > 0, "update: expected begin_step(), and a slice below ",
            slice_count(), ", found ", index);
    const int64_t numel = slice(index).master.numel() * slice(index).exchange->size();
    require(gradient.defined() && gradient.dim() == 1 && gradient.is_contiguous() && gradient.numel() == numel &&
                gradient.device() == slice(index).master.device() && at::isFloatingType(gradient.scalar_type()),
            "update: expected this rank's gradient of the whole bucket, flat, ", numel, " elements, found ",
            describe(gradient));
  } else {
    slice_for_update(index, gradient);
  }
  advance(index, gradient, gradient_scale, copy);
}

at::Tensor CompressedOptimizer::own_part(int64_t index, const at::Tensor& bucket) const {
  const optimizers::Slice& own = slice(index);
  return is_part(index) ? bucket.narrow(0, own.bucket_offset, own.master.numel()) : bucket;
}

// The average of the whole bucket, in memory that may be overwritten.
at::Tensor CompressedOptimizer::whole_average(int64_t index, const at::Tensor& average) {
  if (!is_part(index)) return average;
  const Exchange& own = exchange(index);
  if (!own.agreed.defined()) return slice(index).exchange->all_gather(average);
  const int64_t numel = own.all_reduce->numel();
  if (!scratch_.defined() || scratch_.numel() < numel) scratch_ = at::empty({numel}, average.options());
  at::Tensor whole = scratch_.narrow(0, 0, numel);
  decode(index, own.agreed, whole);
  return whole;
}

// To multiply with, in place of a fill, so that NaN stays visible.
const at::Tensor& CompressedOptimizer::moving_of(const Exchange& exchange) {
  return exchange.moving.defined() ? exchange.moving : exchange.mask;
}

void CompressedOptimizer::decode(int64_t index, const at::Tensor& agreed, const at::Tensor& bucket) {
  const Exchange& own = exchange(index);
  own.all_reduce->decode(agreed, bucket);
  if (const at::Tensor& moving = moving_of(own); moving.defined()) at::Tensor(bucket).mul_(moving);
}

void CompressedOptimizer::set_average_mask(int64_t index, const at::Tensor& mask) {
  require(index >= 0 && index < slice_count(), "expected a slice below ", slice_count(), ", found ", index);
  const int64_t numel = slice(index).master.numel() * slice(index).exchange->size();
  require(mask.defined() && mask.dim() == 1 && mask.numel() == numel && mask.scalar_type() == at::kBool, name(),
          ": exp_avg_mask: expected a flat bool tensor of ", numel, " elements, found ", describe(mask));
  exchange(index).mask = mask;
  exchange(index).moving_known = false;
}

void CompressedOptimizer::hold_without_variance(int64_t index, const at::Tensor& variance) {
  Exchange& own = exchange(index);
  if (own.moving_known) return;
  own.moving_known = true;
  own.moving = slice(index).exchange->all_gather(variance.ne(0));
  if (own.mask.defined()) own.moving.logical_and_(own.mask);
  for (const auto& [offset, length] : gaps_between(slice(index).bucket_segments, own.moving.numel())) {
    own.moving.narrow(0, offset, length).fill_(true);  // nothing arrives there
  }
  if (own.moving.all().item<bool>()) own.moving.reset();
}

void CompressedOptimizer::exchange_average(int64_t index, const at::Tensor& average, const at::Tensor& gradient,
                                           double scale, double beta) {
  const at::Tensor whole = whole_average(index, average);
  // Two products and a sum, each rounded: FMAs would tie the result to the vectors of a machine.
  optimizers::for_each_chunk(whole, gradient, KernelMemory::kTemporaries,
                             [&](int64_t /*begin*/, const at::Tensor& a, const at::Tensor& g) {
                               if (scale != 1.0) g.mul_(scale);
                               a.mul_(beta).add_(g.mul_(1 - beta));
                             });
  Exchange& own = exchange(index);
  if (alone()) {
    if (const at::Tensor& moving = moving_of(own); moving.defined()) at::Tensor(average).mul_(moving);
    return;
  }
  own.worker_error.add_(whole);
  const at::Tensor agreed = own.all_reduce->run(own.worker_error, own.server_error, label("momentum", index));
  if (is_part(index)) {
    own.agreed = agreed;
    own.all_reduce->decode_own(agreed, average);
    if (const at::Tensor& moving = moving_of(own); moving.defined()) at::Tensor(average).mul_(own_part(index, moving));
  } else {
    decode(index, agreed, average);
  }
}

void CompressedOptimizer::exchange_values(int64_t index, const at::Tensor& values, const char* what) {
  if (alone()) return;
  Exchange& own = exchange(index);
  own.worker_error.add_(values);
  decode(index, own.all_reduce->run(own.worker_error, own.server_error, label(what, index)), values);
}

at::Tensor CompressedOptimizer::reduced(int64_t index, const at::Tensor& gradient) const {
  if (!alone()) communicator_.all_reduce(gradient, comm::ReduceOp::kAvg, label("gradients", index)).wait();
  return own_part(index, gradient);
}

void CompressedOptimizer::require_freeze_step(int64_t freeze_step, bool deepspeed_semantics) {
  const int64_t fewest = deepspeed_semantics ? 2 : 1;  // their first one moves nothing
  require<ConfigError>(freeze_step >= fewest, "optimizer.params.freeze_step: expected at least ", fewest, ", found ",
                       freeze_step, "; the variance that is frozen comes from the steps before");
}

void CompressedOptimizer::forget_errors(int64_t index) {
  if (alone()) return;
  exchange(index).worker_error.zero_();
  exchange(index).server_error.zero_();
}

optimizers::NamedStates CompressedOptimizer::rank_states() {
  optimizers::NamedStates states;
  for (size_t i = 0; i < exchanges_.size(); ++i) {
    if (!exchanges_[i].worker_error.defined()) continue;
    states.emplace_back(cat("worker_error.", i), exchanges_[i].worker_error);
    states.emplace_back(cat("server_error.", i), exchanges_[i].server_error);
  }
  return states;
}

void CompressedOptimizer::states_changed(bool rank_states) {
  for (size_t i = 0; i < exchanges_.size(); ++i) {
    exchanges_[i].agreed.reset();
    exchanges_[i].moving_known = false;
    if (!rank_states) forget_errors(static_cast<int64_t>(i));
  }
}

}  // namespace ds::compression
