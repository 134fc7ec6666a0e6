#include "compression/compressed_all_reduce.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/round_up.h"
#include "core/tensor_check.h"

namespace ds::compression {
namespace {

constexpr int64_t kSignsInByte = 8;
constexpr int64_t kScaleBytes = sizeof(float);

void require_values(const char* what, const at::Tensor& values, int64_t numel) {
  require(values.defined() && values.dim() == 1 && values.is_contiguous() && values.scalar_type() == at::kFloat &&
              values.numel() == numel,
          what, ": expected a flat contiguous float32 tensor of ", numel, " elements, found ", describe(values));
}

// What of the ranges lies in [begin, end), counted from `begin`.
std::vector<ScaleRange> pieces_of(const std::vector<ScaleRange>& ranges, int64_t begin, int64_t end,
                                  std::vector<int64_t>& range_of_piece) {
  std::vector<ScaleRange> pieces;
  for (size_t r = 0; r < ranges.size(); ++r) {
    const int64_t from = std::max(ranges[r].begin, begin);
    const int64_t to = std::min(ranges[r].begin + ranges[r].length, end);
    if (from >= to) continue;
    pieces.push_back({from - begin, to - from});
    range_of_piece.push_back(static_cast<int64_t>(r));
  }
  return pieces;
}

}  // namespace

CompressedAllReduce::CompressedAllReduce(comm::Communicator& communicator, const std::vector<ScaleRange>& ranges,
                                         int64_t numel, at::Device device)
    : communicator_(communicator), worker_(ranges, numel) {
  const int64_t world = communicator.size();
  const int64_t part = round_up((numel + world - 1) / world, kSignsInByte);
  std::vector<int64_t> range_of_piece;
  int64_t most_pieces = 0;
  for (int64_t rank = 0; rank < world; ++rank) {
    const int64_t begin = std::min(rank * part, numel);
    const int64_t end = std::min(begin + part, numel);
    const auto first = static_cast<int64_t>(range_of_piece.size());
    parts_.push_back({begin, SignCodec(pieces_of(ranges, begin, end, range_of_piece), end - begin), first});
    most_pieces = std::max(most_pieces, parts_.back().pieces());
  }
  const at::Tensor indices = at::empty({static_cast<int64_t>(range_of_piece.size())}, at::kLong);
  std::copy(range_of_piece.begin(), range_of_piece.end(), indices.mutable_data_ptr<int64_t>());
  range_of_piece_ = indices.to(device);
  part_bytes_ = part / kSignsInByte;
  message_bytes_ = most_pieces * kScaleBytes + round_up(part_bytes_, kScaleBytes);
}

at::Tensor CompressedAllReduce::scales_in(const at::Tensor& message, const Part& part) const {
  return message.narrow(0, 0, part.pieces() * kScaleBytes).view(at::kFloat);
}

at::Tensor CompressedAllReduce::bits_in(const at::Tensor& message, const Part& part) const {
  return message.narrow(0, message_bytes_ - round_up(part_bytes_, kScaleBytes), part.codec.bytes());
}

at::Tensor CompressedAllReduce::run(const at::Tensor& worker, const at::Tensor& server,
                                    const std::string& label) const {
  const at::NoGradGuard no_grad;
  require_values("compressed all-reduce: values", worker, numel());
  require_values("compressed all-reduce: error of the server", server, own_numel());
  const int64_t world = communicator_.size();
  const auto bytes = worker.options().dtype(at::kByte);

  const at::Tensor scales = at::empty({worker_.range_count()}, worker.options());
  const at::Tensor bits = at::empty({worker_.bytes()}, bytes);
  worker_.scales(worker, scales);
  worker_.encode(worker, scales, bits);
  const at::Tensor piece_scales = scales.index_select(0, range_of_piece_);
  const at::Tensor sent = at::zeros({world, message_bytes_}, bytes);  // what fills messages up is sent too
  for (int64_t rank = 0; rank < world; ++rank) {
    const Part& part = parts_[static_cast<size_t>(rank)];
    scales_in(sent[rank], part).copy_(piece_scales.narrow(0, part.first_piece, part.pieces()));
    bits_in(sent[rank], part).copy_(bits.narrow(0, part.begin / kSignsInByte, part.codec.bytes()));
  }
  const at::Tensor received = at::empty_like(sent);
  communicator_.all_to_all(received, sent, {}, {}, label).wait();

  const Part& own = parts_[static_cast<size_t>(communicator_.rank())];
  for (int64_t rank = 0; rank < world; ++rank) {
    const at::Tensor message = received[rank];
    own.codec.add(bits_in(message, own), scales_in(message, own).div(static_cast<double>(world)), server);
  }
  const at::Tensor answer = sent[communicator_.rank()];
  const at::Tensor own_scales = scales_in(answer, own);
  own.codec.scales(server, own_scales);
  own.codec.encode(server, own_scales, bits_in(answer, own));
  communicator_.all_gather(received, answer, label).wait();
  return received;
}

void CompressedAllReduce::decode_part(const at::Tensor& messages, int rank, const at::Tensor& result) const {
  const Part& part = parts_[static_cast<size_t>(rank)];
  const at::Tensor message = messages[rank];
  part.codec.decode(bits_in(message, part), scales_in(message, part), result);
}

void CompressedAllReduce::decode(const at::Tensor& messages, const at::Tensor& result) const {
  const at::NoGradGuard no_grad;
  require_values("compressed all-reduce: result", result, numel());
  for (int rank = 0; rank < communicator_.size(); ++rank) {
    const Part& part = parts_[static_cast<size_t>(rank)];
    decode_part(messages, rank, result.narrow(0, part.begin, part.codec.numel()));
  }
}

void CompressedAllReduce::decode_own(const at::Tensor& messages, const at::Tensor& result) const {
  const at::NoGradGuard no_grad;
  require_values("compressed all-reduce: own part of the result", result, own_numel());
  decode_part(messages, communicator_.rank(), result);
}

}  // namespace ds::compression
