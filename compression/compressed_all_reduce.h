// All-reduce of signs with error feedback on both sides, the exchange of 1-bit Adam (Tang et al., arXiv:2102.02888,
// section 4; DeepSpeed's compressed_allreduce):
//
//   worker    x = values + e_w;   s_w = |x|_2 / sqrt(n) per range;   e_w = x - s_w sgn(x)
//             part r of the signs goes to rank r
//   server r  y = e_s + sum over ranks of (s_w / W) sgn, in rank order;   s_s = |y|_2 / sqrt(n);   e_s = y - s_s sgn(y)
//             the signs of y go to all ranks
//   result    s_s sgn(y): the same bits on every rank
//
// W ranks, any number; rank r is the server of part r of the elements. Each side sends 1 bit for an element and a
// float32 for a range, so a rank hands (W-1)/W n/4 bytes to others where a float32 all-reduce hands 8 n (W-1)/W: 1/32.
//
// Ranges are the parameters of a bucket: each has a scale of its own, so layers of different size do not blur one
// another (what 1-bit LAMB's momentum scaling, arXiv:2104.06069, stands in for where all layers share one). A part may
// cut a range; its pieces have scales of their own on the server's side. Elements between ranges come back as 0.
//
// Tensors are contiguous and flat, float32, on the communicator's device. All calls are collective and block; used
// from one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "compression/sign_codec.h"
#include "dsengine/comm.h"

namespace ds::compression {

class CompressedAllReduce {
 public:
  // Exchanges `numel` elements on `device`; `ranges` as SignCodec takes them. `communicator` outlives it. Parts are
  // equal, a multiple of 8 elements; where numel is no multiple of 8 W the last ones are shorter, or empty. Throws
  // UsageError.
  CompressedAllReduce(comm::Communicator& communicator, const std::vector<ScaleRange>& ranges, int64_t numel,
                      at::Device device = at::kCPU);

  int64_t numel() const { return worker_.numel(); }
  // Elements of this rank's part, which is what the server's error has.
  int64_t own_numel() const { return parts_[static_cast<size_t>(communicator_.rank())].codec.numel(); }
  // Elements before part `rank`.
  int64_t part_begin(int rank) const { return parts_[static_cast<size_t>(rank)].begin; }

  // `worker` [numel]: this rank's values with its error added; becomes the new error. `server` [own_numel]: the
  // server's error, replaced by the new one. Returns the result as the bytes that all ranks have got,
  // uint8 [W, bytes of a message], for decode(). Elements of `worker` between the ranges stay as they are.
  at::Tensor run(const at::Tensor& worker, const at::Tensor& server, const std::string& label) const;
  // Writes the whole result into `result` [numel].
  void decode(const at::Tensor& messages, const at::Tensor& result) const;
  // Writes this rank's part of it into `result` [own_numel].
  void decode_own(const at::Tensor& messages, const at::Tensor& result) const;

 private:
  struct Part {
    int64_t begin;
    SignCodec codec;          // over its pieces of ranges
    int64_t first_piece = 0;  // among the pieces of all parts
    int64_t pieces() const { return codec.range_count(); }
  };

  void decode_part(const at::Tensor& messages, int rank, const at::Tensor& result) const;
  at::Tensor scales_in(const at::Tensor& message, const Part& part) const;
  at::Tensor bits_in(const at::Tensor& message, const Part& part) const;

  comm::Communicator& communicator_;
  SignCodec worker_;
  std::vector<Part> parts_;
  at::Tensor range_of_piece_;  // int64 [pieces of all parts], on the device
  int64_t part_bytes_;         // what the signs take in a message
  int64_t message_bytes_;      // scales, then signs; a multiple of 4
};

}  // namespace ds::compression
