#include "compression/top_k_reduction.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ge.h>
#include <ATen/ops/gt.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "compression/bucket_parts.h"
#include "compression/chained_work.h"
#include "core/check.h"
#include "core/tensor_check.h"

namespace ds::compression {
namespace {

at::Tensor largest_of(const at::Tensor& magnitudes, int64_t count) {
  const at::Tensor least = std::get<0>(at::topk(magnitudes, count, 0, /*largest=*/true, /*sorted=*/false)).min();
  const at::Tensor above = at::nonzero(magnitudes > least).view(-1);
  const at::Tensor ties = at::nonzero(magnitudes == least).view(-1).narrow(0, 0, count - above.numel());
  return at::cat({above, ties});
}

// Ascending positions of more elements than the `count` largest, these among them; undefined where it is not worth it.
// As Deep Gradient Compression does, a sample tells how large they are.
at::Tensor candidates_for(const at::Tensor& magnitudes, int64_t count) {
  constexpr int64_t kStride = 61;  // no likely width of a matrix
  constexpr int64_t kSpare = 64;
  const at::Tensor sample = magnitudes.slice(0, 0, magnitudes.numel(), kStride);
  const int64_t sampled = count / kStride * 5 / 4 + kSpare;
  if (sampled > sample.numel() / 2) return {};
  const at::Tensor bound = std::get<0>(at::topk(sample, sampled, 0, /*largest=*/true, /*sorted=*/false)).min();
  const at::Tensor candidates = at::nonzero(magnitudes >= bound).view(-1);
  return candidates.numel() >= count ? candidates : at::Tensor();
}

// A device's elements as numbers of which no two are equal: the magnitude's bits, then the place from the end. What was
// compared with nonzero() would make the host wait for how many there are.
at::Tensor largest_by_keys(const at::Tensor& values, int64_t count) {
  constexpr int64_t kPlaceBits = 32;
  const at::Tensor keys = values.to(at::kFloat).abs().view(at::kInt).to(at::kLong);
  keys.bitwise_left_shift_(kPlaceBits).sub_(at::arange(values.numel(), keys.options().dtype(at::kInt)));
  return std::get<1>(at::topk(keys, count, 0, /*largest=*/true, /*sorted=*/false));
}

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

at::Tensor largest_elements(const at::Tensor& values, int64_t count) {
  const auto positions = values.options().dtype(at::kLong);
  if (count == values.numel()) return at::arange(count, positions);
  if (count == 0) return at::empty({0}, positions);
  if (!values.is_cpu()) return largest_by_keys(values, count);
  const at::Tensor magnitudes = values.abs();
  const at::Tensor candidates = candidates_for(magnitudes, count);
  if (!candidates.defined()) return largest_of(magnitudes, count);
  return candidates.index_select(0, largest_of(magnitudes.index_select(0, candidates), count));
}

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
