#include "compression/sign_reduction.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "compression/bucket_parts.h"
#include "core/check.h"

namespace ds::compression {
namespace {

std::vector<int64_t> numels_of(const std::vector<SignBucket>& buckets) {
  std::vector<int64_t> numels;
  for (const SignBucket& bucket : buckets) numels.push_back(bucket.numel);
  return numels;
}

}  // namespace

SignReduction::SignReduction(std::shared_ptr<comm::Communicator> group, const std::vector<SignBucket>& buckets,
                             at::Device device, bool feedback)
    : group_(std::move(group)), errors_(numels_of(buckets), device, feedback) {
  for (const SignBucket& bucket : buckets) {
    exchanges_.emplace_back();
    servers_.emplace_back();
    if (bucket.numel == 0) continue;
    exchanges_.back().emplace(*group_, bucket.ranges, bucket.numel, device);
    if (feedback) {
      servers_.back() =
          at::zeros({exchanges_.back()->own_numel()}, at::TensorOptions().dtype(at::kFloat).device(device));
    }
  }
}

void SignReduction::begin_pass(int64_t /*step*/, double scale) {
  scale_ = scale;
  errors_.set_scale(scale);
}

std::vector<std::pair<std::string, at::Tensor>> SignReduction::memory() const {
  auto result = errors_.memory();
  for (size_t b = 0; b < servers_.size(); ++b) {
    if (servers_[b].defined()) result.emplace_back(cat("server.", b), servers_[b]);
  }
  return result;
}

void SignReduction::forget() {
  errors_.forget();
  for (const at::Tensor& server : servers_) {
    if (server.defined()) server.zero_();
  }
}

// result = the mean of what the ranks' `worker` say; these become what they do not say.
void SignReduction::exchange(size_t bucket, const at::Tensor& worker, const at::Tensor& result,
                             const std::string& label) const {
  const CompressedAllReduce& all_reduce = *exchanges_[bucket];
  at::Tensor server = servers_[bucket];
  const at::Tensor scratch =
      server.defined() ? server * scale_ : at::zeros({all_reduce.own_numel()}, worker.options().dtype(at::kFloat));
  all_reduce.decode(all_reduce.run(worker, scratch, label), result);
  if (!server.defined()) return;
  if (!server.is_cpu()) {
    at::where_out(server, finiteness_of(scratch), at::div(scratch, scale_), server);
  } else if (all_finite(scratch)) {
    server.copy_(scratch).div_(scale_);
  }
}

comm::Work SignReduction::start(size_t bucket, const at::Tensor& output, const at::Tensor& gradient, comm::ReduceOp op,
                                std::string label) {
  const at::NoGradGuard no_grad;
  const int ranks = group_->size();
  require_reduction("sign reduction", label, output, gradient, op, ranks);
  require(exchanges_.at(bucket) && exchanges_[bucket]->numel() == gradient.numel(), "sign reduction (", label,
          "): expected bucket ", bucket, " with its ", exchanges_[bucket] ? exchanges_[bucket]->numel() : 0,
          " elements, found ", gradient.numel());
  if (ranks == 1) return keep_alone(output, gradient);
  Corrected corrected = errors_.open(bucket, gradient);
  const at::Tensor worker =
      corrected.error.defined() ? corrected.error : gradient.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  const bool direct = takes_all(output, gradient) && output.scalar_type() == at::kFloat;
  const at::Tensor result = direct ? output : at::empty({gradient.numel()}, worker.options());
  exchange(bucket, worker, result, label);
  ErrorMemory::close(corrected);
  if (op == comm::ReduceOp::kSum) result.mul_(ranks);
  if (direct) return {};
  const int64_t begin = takes_all(output, gradient) ? 0 : group_->rank() * output.numel();
  output.copy_(result.narrow(0, begin, output.numel()));
  return {};
}

}  // namespace ds::compression
