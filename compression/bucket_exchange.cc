#include "compression/bucket_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <utility>
#include <vector>

#include "core/check.h"
#include "core/slices/segment_gaps.h"
#include "optim/chunked_update.h"

namespace ds::compression {

BucketExchange::BucketExchange(const optimizers::Slice& slice, int64_t index, comm::Communicator& communicator,
                               at::Tensor& scratch)
    : slice_(slice), index_(index), communicator_(communicator), scratch_(scratch) {
  if (alone()) return;
  std::vector<ScaleRange> ranges;
  for (const Segment& segment : slice.bucket_segments) ranges.push_back({segment.slice_offset, segment.length});
  const int64_t numel = slice.master.numel() * slice.exchange->size();
  all_reduce_ = std::make_unique<CompressedAllReduce>(communicator, ranges, numel, slice.master.device());
  const auto options = slice.master.options().dtype(at::kFloat).requires_grad(false);
  worker_error_ = at::zeros({numel}, options);
  server_error_ = at::zeros({all_reduce_->own_numel()}, options);
  ensure(!is_part() || all_reduce_->own_numel() == slice.master.numel(), "a part is a slice");
}

std::string BucketExchange::label(const char* what) const { return cat(what, " of bucket ", index_); }

at::Tensor BucketExchange::own_part(const at::Tensor& bucket) const {
  return is_part() ? bucket.narrow(0, slice_.bucket_offset, slice_.master.numel()) : bucket;
}

at::Tensor BucketExchange::whole_average(const at::Tensor& average) {
  if (!is_part()) return average;
  if (!agreed_.defined()) return slice_.exchange->all_gather(average);
  const int64_t numel = all_reduce_->numel();
  if (!scratch_.defined() || scratch_.numel() < numel) scratch_ = at::empty({numel}, average.options());
  at::Tensor whole = scratch_.narrow(0, 0, numel);
  decode(agreed_, whole);
  return whole;
}

void BucketExchange::decode(const at::Tensor& agreed, const at::Tensor& bucket) const {
  all_reduce_->decode(agreed, bucket);
  if (moving().defined()) at::Tensor(bucket).mul_(moving());
}

void BucketExchange::set_mask(const at::Tensor& mask) {
  mask_ = mask;
  moving_known_ = false;
}

void BucketExchange::hold_without_variance(const at::Tensor& variance) {
  if (moving_known_) return;
  moving_known_ = true;
  moving_ = slice_.exchange->all_gather(variance.ne(0));
  if (mask_.defined()) moving_.logical_and_(mask_);
  for (const auto& [offset, length] : gaps_between(slice_.bucket_segments, moving_.numel())) {
    moving_.narrow(0, offset, length).fill_(true);  // nothing arrives there
  }
  if (moving_.all().item<bool>()) moving_.reset();
}

void BucketExchange::exchange_average(const at::Tensor& average, const at::Tensor& gradient, double scale,
                                      double beta) {
  const at::Tensor whole = whole_average(average);
  // Two products and a sum, each rounded: FMAs would tie the result to the vectors of a machine.
  optimizers::for_each_chunk(whole, gradient, optimizers::KernelMemory::kTemporaries,
                             [&](int64_t /*begin*/, const at::Tensor& a, const at::Tensor& g) {
                               if (scale != 1.0) g.mul_(scale);
                               a.mul_(beta).add_(g.mul_(1 - beta));
                             });
  if (alone()) {
    if (moving().defined()) at::Tensor(average).mul_(moving());
    return;
  }
  worker_error_.add_(whole);
  const at::Tensor agreed = all_reduce_->run(worker_error_, server_error_, label("momentum"));
  if (is_part()) {
    agreed_ = agreed;
    all_reduce_->decode_own(agreed, average);
    if (moving().defined()) at::Tensor(average).mul_(own_part(moving()));
  } else {
    decode(agreed, average);
  }
}

void BucketExchange::exchange_values(const at::Tensor& values, const char* what) {
  if (alone()) return;
  worker_error_.add_(values);
  decode(all_reduce_->run(worker_error_, server_error_, label(what)), values);
}

at::Tensor BucketExchange::reduce_gradient(const at::Tensor& gradient) const {
  if (!alone()) communicator_.all_reduce(gradient, comm::ReduceOp::kAvg, label("gradients")).wait();
  return own_part(gradient);
}

void BucketExchange::take_largest(const at::Tensor& values, const char* what) const {
  communicator_.all_reduce(values, comm::ReduceOp::kMax, label(what)).wait();
}

void BucketExchange::forget_errors() {
  if (alone()) return;
  worker_error_.zero_();
  server_error_.zero_();
}

void BucketExchange::add_errors(optimizers::NamedStates& states) const {
  if (!worker_error_.defined()) return;
  states.emplace_back(cat("worker_error.", index_), worker_error_);
  states.emplace_back(cat("server_error.", index_), server_error_);
}

void BucketExchange::states_changed(bool rank_states) {
  agreed_.reset();
  moving_known_ = false;
  if (!rank_states) forget_errors();
}

}  // namespace ds::compression
