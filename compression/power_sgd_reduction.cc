#include "compression/power_sgd_reduction.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <limits>
#include <memory>

#include "compression/bucket_parts.h"
#include "compression/chained_work.h"
#include "core/check.h"
#include "core/tensor_check.h"

namespace ds::compression {
namespace {

// Columns that are zero or depend on others become some direction of their own, so that no factor stays empty.
void make_orthonormal(const at::Tensor& columns) { columns.copy_(std::get<0>(at::linalg_qr(columns, "reduced"))); }

at::Tensor matrix_in(const at::Tensor& flat, const BucketMatrix& matrix) {
  return flat.narrow(0, matrix.offset, matrix.numel()).view({matrix.rows, matrix.columns});
}

}  // namespace

int64_t MatrixBucket::left_numel() const {
  int64_t total = 0;
  for (const BucketMatrix& matrix : matrices) total += matrix.left_numel();
  return total;
}

int64_t MatrixBucket::right_numel() const {
  int64_t total = 0;
  for (const BucketMatrix& matrix : matrices) total += matrix.right_numel();
  return total;
}

int64_t MatrixBucket::dense_numel() const {
  int64_t total = 0;
  for (const DenseRange& range : dense) total += range.length;
  return total;
}

MatrixBucket matrices_of(const std::vector<Segment>& segments, const std::vector<ParameterInfo>& parameters,
                         int64_t numel, int64_t rank) {
  require(rank > 0, "matrices_of: expected a rank above 0, found ", rank);
  MatrixBucket bucket{.numel = numel, .matrices = {}, .dense = {}};
  for (const Segment& segment : segments) {
    const ParameterInfo& parameter = parameters.at(static_cast<size_t>(segment.parameter));
    require(segment.length == parameter.numel, "matrices_of: parameter ", parameter.name, ": expected all of its ",
            parameter.numel, " elements in one segment, found ", segment.length);
    BucketMatrix matrix{.offset = segment.slice_offset};
    if (parameter.sizes.size() >= 2 && parameter.numel > 0) {
      matrix.rows = parameter.sizes.front();
      matrix.columns = parameter.numel / matrix.rows;
      matrix.rank = std::min({rank, matrix.rows, matrix.columns});
    }
    if (matrix.left_numel() + matrix.right_numel() < matrix.numel()) {
      bucket.matrices.push_back(matrix);
    } else if (!bucket.dense.empty() &&
               bucket.dense.back().offset + bucket.dense.back().length == segment.slice_offset) {
      bucket.dense.back().length += segment.length;
    } else {
      bucket.dense.push_back({segment.slice_offset, segment.length});
    }
  }
  return bucket;
}

struct PowerSgdReduction::Exchange {
  size_t bucket = 0;
  at::Tensor output;
  at::Tensor gradient;
  int64_t begin = 0;  // of output in the bucket
  comm::ReduceOp op = comm::ReduceOp::kSum;
  Corrected corrected;
  at::Tensor left;     // float32: the P, then what is dense
  at::Tensor right;    // float32: the Q
  bool finite = true;  // on all ranks
};

PowerSgdReduction::PowerSgdReduction(ExchangeGroups groups, ErrorMemory errors, std::vector<MatrixBucket> buckets,
                                     at::Device device)
    : groups_(std::move(groups)), errors_(std::move(errors)), buckets_(std::move(buckets)) {
  for (const MatrixBucket& bucket : buckets_) {
    right_.emplace_back();
    if (bucket.matrices.empty()) continue;
    right_.back() = at::empty({bucket.right_numel()}, at::TensorOptions().dtype(at::kFloat).device(device));
  }
  forget();
}

void PowerSgdReduction::begin_pass(int64_t /*step*/, double scale) { errors_.set_scale(scale); }

std::vector<std::pair<std::string, at::Tensor>> PowerSgdReduction::memory() const {
  auto result = errors_.memory();
  for (size_t b = 0; b < right_.size(); ++b) {
    if (right_[b].defined()) result.emplace_back(cat("factors.", b), right_[b]);
  }
  return result;
}

void PowerSgdReduction::forget() {
  errors_.forget();
  for (size_t b = 0; b < right_.size(); ++b) {
    if (!right_[b].defined()) continue;
    at::Generator generator = at::detail::createCPUGenerator(/*seed_val=*/b + 1);
    right_[b].copy_(at::empty(right_[b].sizes(), at::kFloat).normal_(0, 1, generator));
  }
}

at::Tensor PowerSgdReduction::factor(const at::Tensor& flat, int64_t offset, int64_t rows, int64_t rank) const {
  return flat.narrow(0, offset, rows * rank).view({rows, rank});
}

comm::Work PowerSgdReduction::start(size_t index, const at::Tensor& output, const at::Tensor& gradient,
                                    comm::ReduceOp op, std::string label) {
  const at::NoGradGuard no_grad;
  require_reduction("PowerSGD", label, output, gradient, op, groups_.size());
  const MatrixBucket& bucket = buckets_.at(index);
  require(bucket.numel == gradient.numel(), "PowerSGD (", label, "): expected ", bucket.numel, " elements, found ",
          describe(gradient));
  if (groups_.size() == 1) return keep_alone(output, gradient);
  auto exchange = std::make_shared<Exchange>();
  exchange->bucket = index;
  exchange->output = output;
  exchange->gradient = gradient;
  exchange->begin = takes_all(output, gradient) ? 0 : groups_.rank() * output.numel();
  exchange->op = op;
  exchange->corrected = errors_.open(index, gradient);
  const at::Tensor& values = exchange->corrected.values;
  exchange->left = at::empty({bucket.left_numel() + bucket.dense_numel()}, gradient.options().dtype(at::kFloat));
  int64_t left = 0;
  int64_t right = 0;
  for (const BucketMatrix& matrix : bucket.matrices) {
    const at::Tensor q = factor(right_[index], right, matrix.columns, matrix.rank);
    make_orthonormal(q);
    const at::Tensor p = factor(exchange->left, left, matrix.rows, matrix.rank);
    p.copy_(at::mm(matrix_in(values, matrix).to(at::kFloat), q));
    left += matrix.left_numel();
    right += matrix.right_numel();
  }
  for (const DenseRange& range : bucket.dense) {
    exchange->left.narrow(0, left, range.length).copy_(values.narrow(0, range.offset, range.length));
    left += range.length;
  }
  if (left == 0) {  // padding alone
    output.zero_();
    return {};
  }
  return chained(groups_.first->all_reduce(exchange->left, op, label),
                 {[this, exchange, label] { return exchange_right(*exchange, label); },
                  [this, exchange]() -> comm::Work {
                    finish(*exchange);
                    return {};
                  }});
}

comm::Work PowerSgdReduction::exchange_right(Exchange& exchange, const std::string& label) const {
  const MatrixBucket& bucket = buckets_[exchange.bucket];
  Corrected& corrected = exchange.corrected;
  exchange.finite = all_finite(exchange.left);  // the same bits, so the same answer on every rank
  if (!exchange.finite) {
    ErrorMemory::give_up(corrected, exchange.gradient);
    return {};
  }
  exchange.right = at::empty({bucket.right_numel()}, exchange.left.options());
  int64_t left = 0;
  int64_t right = 0;
  for (const BucketMatrix& matrix : bucket.matrices) {
    const at::Tensor p = factor(exchange.left, left, matrix.rows, matrix.rank);
    const at::Tensor q = factor(exchange.right, right, matrix.columns, matrix.rank);
    const at::Tensor values = matrix_in(corrected.values, matrix);
    make_orthonormal(p);
    q.copy_(at::mm(values.to(at::kFloat).t(), p));
    if (corrected.error.defined()) values.addmm_(p, q.t(), 1, -1);
    left += matrix.left_numel();
    right += matrix.right_numel();
  }
  if (corrected.error.defined()) {
    for (const DenseRange& range : bucket.dense) corrected.error.narrow(0, range.offset, range.length).zero_();
    ErrorMemory::close(corrected);
  }
  if (bucket.matrices.empty()) return {};
  return groups_.second->all_reduce(exchange.right, exchange.op, label);
}

// Writes what of the bucket lies in [begin, begin + output.numel()).
void PowerSgdReduction::finish(Exchange& exchange) const {
  const MatrixBucket& bucket = buckets_[exchange.bucket];
  const at::Tensor& output = exchange.output;
  if (!exchange.finite) {
    output.fill_(std::numeric_limits<double>::quiet_NaN());
    return;
  }
  const int64_t end = exchange.begin + output.numel();
  // [offset, offset + length) of the bucket becomes `values`, where it lies in the output.
  const auto write = [&](int64_t offset, const at::Tensor& values) {
    const int64_t from = std::max(offset, exchange.begin);
    const int64_t to = std::min(offset + values.numel(), end);
    if (from < to) output.narrow(0, from - exchange.begin, to - from).copy_(values.narrow(0, from - offset, to - from));
  };
  output.zero_();  // padding
  int64_t left = 0;
  int64_t right = 0;
  for (const BucketMatrix& matrix : bucket.matrices) {
    // Rows of which some element is in the output.
    const int64_t first = std::clamp((exchange.begin - matrix.offset) / matrix.columns, int64_t{0}, matrix.rows);
    const int64_t last =
        std::clamp((end - matrix.offset + matrix.columns - 1) / matrix.columns, int64_t{0}, matrix.rows);
    if (first < last) {
      const at::Tensor p = factor(exchange.left, left, matrix.rows, matrix.rank).narrow(0, first, last - first);
      const at::Tensor q = factor(exchange.right, right, matrix.columns, matrix.rank);
      write(matrix.offset + first * matrix.columns, at::mm(p, q.t()).view(-1));
    }
    left += matrix.left_numel();
    right += matrix.right_numel();
  }
  for (const DenseRange& range : bucket.dense) {
    write(range.offset, exchange.left.narrow(0, left, range.length));
    left += range.length;
  }
  if (right > 0) right_[exchange.bucket].copy_(exchange.right);
}

}  // namespace ds::compression
