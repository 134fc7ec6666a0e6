// Block quantisation: floating point as 8-bit or 4-bit integers with one float32 scale per block.
//
// ZeRO++ (Wang et al., arXiv:2306.10209) sends these in place of weights and gradients. Symmetric: with L = 2^(bits-1)
// - 1 levels on each side of zero, a block of kBlock values has scale = largest magnitude / L, and a value x becomes
// the integer nearest to x / scale (ties to even). Decoded values differ from x by at most scale / 2 (and the rounding
// of float32, and of the type they are written in).
//
//   all zero in a block         decodes to zeros
//   only very small values      below (L + 1) * 1.2e-38 (float32's smallest normal number) they decode to zeros
//   Inf or NaN in a block       the scale is NaN, so all of the block decodes to NaN: overflow stays visible
//
// Encoded form, uint8 [encoded_bytes(numel)]: the integers block after block, then zeros up to a multiple of four
// bytes, then the scales (float32, in the machine's byte order). 8 bits: two's complement. 4 bits: integer + 8; byte i
// of a block of n values holds value i in its low half and value i + ceil(n/2) in its high half, which lets vector
// units unpack without shuffles. The last block may be short. The size is a multiple of four, so encoded parts may lie
// one after another in one tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace ds {

// Holds no tensors; copyable; thread safe. Values are contiguous float32, bfloat16 or float16 of any shape; encoded
// tensors are contiguous uint8 [encoded_bytes(numel)] on the same device that begin at a multiple of four bytes of
// their storage. Tensors that break this give UsageError. CPU tensors are worked on by LibTorch's intra-op threads and
// need no memory beside the tensors, nor do CUDA tensors where libdsengine_cuda is loaded: one kernel a call, on the
// current stream, for up to 448 parts. Others go through LibTorch's operators, with temporaries of at most 100 MiB. All
// ways give the same bits, but for the sign of a NaN. Gradients are not recorded. Throws ConfigError where the device
// does not take a kernel.
class BlockCodec {
 public:
  static constexpr int64_t kBlock = 512;  // a scale adds 0.8 % to 8 bits, 1.6 % to 4 bits

  explicit BlockCodec(int bits);  // 8 or 4, else UsageError
  int bits() const { return bits_; }
  int levels() const { return (1 << (bits_ - 1)) - 1; }  // L: 127 or 7

  int64_t encoded_bytes(int64_t numel) const { return payload_bytes(numel) + blocks(numel) * kScaleBytes; }
  void encode(const at::Tensor& values, const at::Tensor& encoded) const;
  void decode(const at::Tensor& encoded, const at::Tensor& values) const { decode_sum({encoded}, values); }
  // values = (parts[0] + parts[1] + ...) / divisor, added in this order in float32 and rounded once. At least one part.
  void decode_sum(const std::vector<at::Tensor>& parts, const at::Tensor& values, int divisor = 1) const;

  // Do that work by LibTorch's operators, on any device, the CPU included: the way where there is nothing better.
  void encode_by_operators(const at::Tensor& values, const at::Tensor& encoded) const;
  void decode_sum_by_operators(const std::vector<at::Tensor>& parts, const at::Tensor& values, int divisor = 1) const;

 private:
  static constexpr int64_t kScaleBytes = 4;

  static int64_t blocks(int64_t numel) { return (numel + kBlock - 1) / kBlock; }
  int64_t payload_bytes(int64_t numel) const;
  at::Tensor scales_of(const at::Tensor& encoded, int64_t numel) const;
  void require_tensors(const char* what, const at::Tensor& values, const at::Tensor& encoded) const;
  at::Tensor integers_of(const at::Tensor& encoded, int64_t begin, int64_t rows, int64_t columns) const;

  int bits_;
};

}  // namespace ds
