// Error feedback: what compression did not send of a gradient is added to the next one (Seide et al., Interspeech 2014;
// Karimireddy et al., arXiv:1901.09847).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace ds::compression {

// Whether no element is Inf or NaN. Waits for the device.
bool all_finite(const at::Tensor& values);
// Whether all elements are finite, as bool [] on the device, without a wait.
at::Tensor finiteness_of(const at::Tensor& values);

// The values that one start() of a reduction sends, and the place where the rest of them stays.
struct Corrected {
  at::Tensor values;  // [n]: the gradient as it is or, in float32, with what was remembered
  at::Tensor error;   // float32 [n], `values` itself; subtract what is sent. Undefined: nothing is remembered
  double scale = 1.0;
  at::Tensor finite = {};  // bool [] of a gradient that its device judges: what is sent, and what is remembered of it,
                           // follows from it there. Undefined: the host has judged
  at::Tensor memory = {};  // float32 [n]: where the error is kept; `error` itself where the host has judged
};

// The error of every bucket, float32, without the loss scale, so that a scale that changes does no harm. On a device
// nothing waits: until close() a bucket then takes as much memory again. Not thread safe.
class ErrorMemory {
 public:
  // `numels`: elements of the buckets, 0 for one that never comes. Without `feedback` it has no memory.
  ErrorMemory(std::vector<int64_t> numels, at::Device device, bool feedback);

  void set_scale(double scale) { scale_ = scale; }
  // A gradient with Inf or NaN is sent alone, so that it arrives as such, and the memory stays. Inf or NaN in the
  // memory itself (of a checkpoint, or of float32 that overflows) counts as 0: it would be sent in every step from then
  // on.
  Corrected open(size_t bucket, const at::Tensor& gradient) const;
  // When what is sent has been subtracted.
  static void close(Corrected& corrected);
  // In place of close(), before anything has been subtracted: as if the gradient had never come.
  static void give_up(Corrected& corrected, const at::Tensor& gradient);
  // After close(): an error found later, part of the bucket from `begin` on. Not where it has Inf or NaN.
  static void add(const Corrected& corrected, int64_t begin, const at::Tensor& error);

  // The errors by name, "error.BUCKET"; live references.
  std::vector<std::pair<std::string, at::Tensor>> memory() const;
  void forget();

 private:
  std::vector<at::Tensor> errors_;  // undefined: nothing to remember
  double scale_ = 1.0;
};

}  // namespace ds::compression
