#include "compression/block_quantized_reduction.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <memory>

#include "compression/bucket_parts.h"
#include "compression/chained_work.h"

namespace ds::compression {

// One start(), until its Work is done. A message holds one encoded part; all have room for the largest.
struct BlockQuantizedReduction::Exchange {
  at::Tensor output;
  Corrected corrected;
  std::vector<Part> parts;
  int64_t message_bytes = 0;
  int divisor = 1;
  at::Tensor sent;      // uint8 [W messages]
  at::Tensor received;  // likewise; from the second exchange on, the sums of all parts

  at::Tensor message(const at::Tensor& messages, size_t part, size_t nth, const BlockCodec& codec) const {
    return messages.narrow(0, static_cast<int64_t>(nth) * message_bytes, codec.encoded_bytes(parts[part].length));
  }
  // The messages of part `part`, from every rank.
  std::vector<at::Tensor> all_messages(size_t part, const BlockCodec& codec) const {
    std::vector<at::Tensor> result;
    for (size_t rank = 0; rank < parts.size(); ++rank) result.push_back(message(received, part, rank, codec));
    return result;
  }
};

BlockQuantizedReduction::BlockQuantizedReduction(ExchangeGroups groups, ErrorMemory errors, int bits)
    : groups_(std::move(groups)), errors_(std::move(errors)), codec_(bits) {}

void BlockQuantizedReduction::begin_pass(int64_t /*step*/, double scale) { errors_.set_scale(scale); }

comm::Work BlockQuantizedReduction::start(size_t bucket, const at::Tensor& output, const at::Tensor& gradient,
                                          comm::ReduceOp op, std::string label) {
  const at::NoGradGuard no_grad;
  const int ranks = groups_.size();
  require_reduction("block quantised reduction", label, output, gradient, op, ranks);
  if (ranks == 1) return keep_alone(output, gradient);
  auto exchange = std::make_shared<Exchange>();
  exchange->output = output;
  exchange->corrected = errors_.open(bucket, gradient);
  exchange->parts = parts_of(gradient.numel(), ranks);
  exchange->message_bytes = codec_.encoded_bytes(exchange->parts.front().length);
  exchange->divisor = divisor_of(op, ranks);
  exchange->sent = at::zeros({ranks * exchange->message_bytes}, gradient.options().dtype(at::kByte));
  exchange->received = at::empty_like(exchange->sent);
  const Corrected& corrected = exchange->corrected;
  at::Tensor decoded;
  for (size_t part = 0; part < exchange->parts.size(); ++part) {
    const auto [begin, length] = exchange->parts[part];
    if (length == 0) continue;
    const at::Tensor message = exchange->message(exchange->sent, part, part, codec_);
    codec_.encode(corrected.values.narrow(0, begin, length), message);
    if (!corrected.error.defined()) continue;
    if (!decoded.defined()) decoded = at::empty({length}, corrected.error.options());
    codec_.decode(message, decoded.narrow(0, 0, length));
    corrected.error.narrow(0, begin, length).sub_(decoded.narrow(0, 0, length));
  }
  ErrorMemory::close(exchange->corrected);
  comm::Work first = groups_.first->all_to_all(exchange->received, exchange->sent, {}, {}, label);
  if (!takes_all(output, gradient)) {
    return chained(std::move(first), {[this, exchange]() -> comm::Work {
                     const auto own = static_cast<size_t>(groups_.rank());
                     codec_.decode_sum(exchange->all_messages(own, codec_), exchange->output, exchange->divisor);
                     return {};
                   }});
  }
  return chained(std::move(first), {[this, exchange, label] { return sum_to_all(*exchange, label); },
                                    [this, exchange]() -> comm::Work {
                                      for (size_t part = 0; part < exchange->parts.size(); ++part) {
                                        const auto [begin, length] = exchange->parts[part];
                                        if (length == 0) continue;
                                        codec_.decode_sum({exchange->message(exchange->received, part, part, codec_)},
                                                          exchange->output.narrow(0, begin, length), exchange->divisor);
                                      }
                                      return {};
                                    }});
}

// The own part of the sum, encoded, becomes a message to all.
comm::Work BlockQuantizedReduction::sum_to_all(Exchange& exchange, const std::string& label) const {
  const auto own = static_cast<size_t>(groups_.rank());
  const auto [begin, length] = exchange.parts[own];
  const at::Tensor& sums = exchange.sent;  // was received by the others
  if (length > 0) {
    const at::Tensor sum = at::empty({length}, exchange.output.options().dtype(at::kFloat));
    const at::Tensor message = exchange.message(sums, own, own, codec_);
    codec_.decode_sum(exchange.all_messages(own, codec_), sum);
    codec_.encode(sum, message);
    if (exchange.corrected.error.defined()) {
      const at::Tensor decoded = at::empty_like(sum);
      codec_.decode(message, decoded);
      ErrorMemory::add(exchange.corrected, begin, sum.sub_(decoded));
    }
  }
  const at::Tensor own_message =
      sums.narrow(0, static_cast<int64_t>(own) * exchange.message_bytes, exchange.message_bytes);
  comm::Work work = groups_.second->all_gather(sums, own_message, label);
  exchange.received = sums;
  return work;
}

}  // namespace ds::compression
