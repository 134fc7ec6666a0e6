#include "compression/top_k_reduction.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "compression/bucket_parts.h"
#include "compression/chained_work.h"
#include "compression/largest_elements.h"
#include "core/check.h"
#include "core/tensor_check.h"

namespace ds::compression {
namespace {

constexpr double kLargestHalf = 65504;

// Positions, then values; a multiple of four bytes, so that messages may follow one another.
int64_t sparse_message_bytes(int64_t count, int64_t value_bytes) {
  constexpr int64_t kAligned = 4;
  return count * kAligned + (count * value_bytes + kAligned - 1) / kAligned * kAligned;
}

at::Tensor positions_in(const at::Tensor& message, int64_t count) {
  return message.narrow(0, 0, count * static_cast<int64_t>(sizeof(int32_t))).view(at::kInt);
}

at::Tensor values_in(const at::Tensor& message, int64_t count, at::ScalarType dtype) {
  return message
      .narrow(0, count * static_cast<int64_t>(sizeof(int32_t)), count * static_cast<int64_t>(c10::elementSize(dtype)))
      .view(dtype);
}

// output = the sum of what the messages say, all else zero.
void add_up(const at::Tensor& messages, int ranks, int64_t count, int divisor, const at::Tensor& output) {
  const bool direct = output.scalar_type() == at::kFloat;
  const at::Tensor sum = direct ? output.zero_() : at::zeros({output.numel()}, output.options().dtype(at::kFloat));
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const at::Tensor message = messages.narrow(0, rank * (messages.numel() / ranks), messages.numel() / ranks);
    sum.index_add_(0, positions_in(message, count), values_in(message, count, output.scalar_type()).to(at::kFloat));
  }
  if (divisor != 1) sum.div_(divisor);
  if (!direct) output.copy_(sum);
}

}  // namespace

TopKReduction::TopKReduction(std::shared_ptr<comm::Communicator> group, ErrorMemory errors, double share)
    : group_(std::move(group)), errors_(std::move(errors)), share_(share) {
  require(share > 0 && share <= 1, "TopKReduction: expected a share above 0, at most 1, found ", share);
}

void TopKReduction::begin_pass(int64_t /*step*/, double scale) { errors_.set_scale(scale); }

int64_t TopKReduction::count_of(int64_t numel) const {
  return std::clamp<int64_t>(static_cast<int64_t>(std::ceil(share_ * static_cast<double>(numel))), 1, numel);
}

// The largest of a range of the bucket, positions counted from its begin, into `message`.
void TopKReduction::pack(const Corrected& corrected, Part range, at::ScalarType dtype, const Verdict& verdict,
                         const at::Tensor& message) const {
  const int64_t count = count_of(range.length);
  const at::Tensor values = corrected.values.narrow(0, range.begin, range.length);
  const at::Tensor sent = values_in(message, count, dtype);
  const auto first_positions = [&] { return at::arange(count, message.options().dtype(at::kLong)); };
  if (!verdict.finite) {
    positions_in(message, count).copy_(first_positions());
    sent.fill_(std::numeric_limits<double>::quiet_NaN());
    return;
  }
  const at::Tensor& finite = verdict.on_device;
  at::Tensor positions = largest_elements(values, count);
  if (finite.defined()) positions = at::where(finite, positions, first_positions());
  positions_in(message, count).copy_(positions);
  at::Tensor picked = values.index_select(0, positions);
  // What is remembered may have grown beyond float16, whose Inf would stay in the memory for good.
  if (dtype == at::kHalf && corrected.error.defined()) picked.clamp_(-kLargestHalf, kLargestHalf);
  if (finite.defined()) {
    picked = at::where(finite, picked, at::full_like(picked, std::numeric_limits<double>::quiet_NaN()));
  }
  sent.copy_(picked);
  if (corrected.error.defined()) values.index_add_(0, positions, sent.to(at::kFloat), -1);
}

comm::Work TopKReduction::start(size_t bucket, const at::Tensor& output, const at::Tensor& gradient, comm::ReduceOp op,
                                std::string label) {
  const at::NoGradGuard no_grad;
  const int ranks = group_->size();
  require_reduction("top-k reduction", label, output, gradient, op, ranks);
  require(gradient.numel() <= std::numeric_limits<int32_t>::max(), "top-k reduction (", label,
          "): expected less than 2^31 elements, found ", describe(gradient), "; use smaller buckets");
  if (ranks == 1 || gradient.numel() == 0) return keep_alone(output, gradient);
  const bool all = takes_all(output, gradient);
  const int64_t length = output.numel();
  const int64_t count = count_of(length);
  const int64_t bytes = sparse_message_bytes(count, gradient.element_size());
  const at::Tensor received = at::empty({ranks * bytes}, gradient.options().dtype(at::kByte));
  const at::Tensor sent = all ? received.narrow(0, group_->rank() * bytes, bytes) : at::empty_like(received);
  sent.zero_();  // what fills a message up
  Corrected corrected = errors_.open(bucket, gradient);
  Verdict verdict;
  if (!gradient.is_cpu()) {
    verdict.on_device = corrected.finite.defined() ? corrected.finite : finiteness_of(gradient);
  } else if (!corrected.error.defined()) {
    verdict.finite = all_finite(gradient);
  }
  for (int64_t part = 0; part < gradient.numel() / length; ++part) {
    pack(corrected, {part * length, length}, gradient.scalar_type(), verdict, sent.narrow(0, part * bytes, bytes));
  }
  ErrorMemory::close(corrected);
  comm::Work work = all ? group_->all_gather(received, sent, std::move(label))
                        : group_->all_to_all(received, sent, {}, {}, std::move(label));
  return chained(std::move(work), {[=, divisor = divisor_of(op, ranks)]() -> comm::Work {
                   add_up(received, ranks, count, divisor, output);
                   return {};
                 }});
}

}  // namespace ds::compression
