// Signs with scales: what the compressed optimizers send of a tensor, one bit an element.
//
// 1-bit Adam (Tang et al., arXiv:2102.02888), 1-bit LAMB and 0/1 Adam send of each element x of a tensor its sign, and
// for all elements of a range (a parameter, say) one scale: |x|_2 / sqrt(length), their root mean square. What the
// bits do not carry, x - scale * sign(x), stays with the sender and is added to what it sends next (error feedback).
//
//   sign(0) = sign(-0) = +1, sign(NaN) = -1
//   Inf or NaN in a range     the scale is Inf or NaN too, so all that is decoded is: overflow stays visible
//   a bit                     bit i % 8 (the least significant is bit 0) of byte i / 8 is 1 where element i has sign +
//   not in a range            bit 0; so are the bits beyond the last element
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace ds::compression {

class SignDeviceCodec;

// Elements [begin, begin + length) of a flat tensor that share one scale.
struct ScaleRange {
  int64_t begin = 0;
  int64_t length = 0;
};

// Copyable, copies share what is kept; thread safe. Holds no tensors of its users. `values` are contiguous float32
// [numel()], `scales` contiguous float32 [range_count()], `bits` contiguous uint8 [bytes()], all on one device and none
// overlapping another. Tensors that break this give UsageError. Elements between ranges (gaps) carry nothing.
//
// CPU tensors are worked on by vector kernels on LibTorch's intra-op threads, without temporaries; any number of small
// ranges is one pass. CUDA tensors are given to kernels on the current stream, also one pass, two for scales; tables of
// the ranges stay on each device that was used (compression/sign_device_codec.h). The kernels are in libdsengine_cuda,
// opened at first use: ConfigError where it cannot be. Tensors of other devices go through LibTorch's operators, on the
// current stream, a few for any number of ranges, with temporaries of at most 100 MiB. Each element is one float32
// operation, x - s or x + s, so all these ways, any number of threads and plain tensor code give the same bits.
// Gradients are not recorded.
class SignCodec {
 public:
  // Ranges ascend, do not overlap, begin at multiples of 8 elements (a byte of bits has one scale) and end within
  // `numel`, else UsageError. A range may be empty: its scale is 0.
  SignCodec(std::vector<ScaleRange> ranges, int64_t numel);

  int64_t numel() const { return numel_; }
  int64_t range_count() const { return static_cast<int64_t>(ranges_.size()); }
  const std::vector<ScaleRange>& ranges() const { return ranges_; }
  int64_t bytes() const { return (numel_ + 7) / 8; }  // the length of `bits`

  // scales[r] = root mean square of range r: summed in float64, rounded to float32 once. The order of the additions
  // depends on the machine's vector length and on the ranges, not on threads; operators have another order, kernels of
  // CUDA a third, which depends on the ranges alone.
  void scales(const at::Tensor& values, const at::Tensor& scales) const;
  // bits = signs, and values -= scale * sign, which is what the bits do not carry. Values in gaps stay.
  void encode(const at::Tensor& values, const at::Tensor& scales, const at::Tensor& bits) const;
  // values = scale * sign, and 0 in gaps.
  void decode(const at::Tensor& bits, const at::Tensor& scales, const at::Tensor& values) const;
  // values += scale * sign. Values in gaps stay.
  void add(const at::Tensor& bits, const at::Tensor& scales, const at::Tensor& values) const;

  // By LibTorch's operators on any device, the CPU included: what the above do on devices without kernels.
  void scales_by_operators(const at::Tensor& values, const at::Tensor& scales) const;
  void encode_by_operators(const at::Tensor& values, const at::Tensor& scales, const at::Tensor& bits) const;
  void decode_by_operators(const at::Tensor& bits, const at::Tensor& scales, const at::Tensor& values) const;
  void add_by_operators(const at::Tensor& bits, const at::Tensor& scales, const at::Tensor& values) const;

 private:
  void require_values(const char* what, const at::Tensor& values, const at::Tensor& scales) const;
  void require_bits(const char* what, const at::Tensor& values, const at::Tensor& bits) const;
  // body(first element, length, range) on the parts of ranges in elements [begin, end), in order.
  template <class Body>
  void for_each_part(int64_t begin, int64_t end, const Body& body) const;
  // The elements from `begin` on that operators take at a time.
  struct OperatorBlock;
  OperatorBlock operator_block(int64_t begin, const at::Tensor& values, const at::Tensor& scales,
                               const at::Tensor& bits) const;

  std::vector<ScaleRange> ranges_;
  // Sums of squares are made by blocks: where those of each range begin, then how many there are.
  std::vector<int64_t> first_sums_;
  int64_t numel_;
  std::shared_ptr<SignDeviceCodec> on_devices_;
};

}  // namespace ds::compression
