// SignCodec on CUDA tensors: gives raw memory, the current stream and the ranges to the kernels of libdsengine_cuda.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "compression/sign_device_kernels.h"

namespace ds::compression {

class SignCodec;

// Belongs to one codec and its copies, which each call names. Tensors are CUDA tensors that SignCodec has checked.
//
// The first call of a codec on a device copies its tables there and waits for that copy: (3 * ranges + elements / 4096)
// 64-bit integers, which stay for the life of the codec. Otherwise calls give work to the current stream and return.
// Throws ConfigError where libdsengine_cuda cannot be opened or has no kernels for the GPU. Thread safe.
class SignDeviceCodec {
 public:
  // Takes 8 bytes for each 16384 elements while it runs.
  void scales(const SignCodec& codec, const at::Tensor& values, const at::Tensor& scales);
  void encode(const SignCodec& codec, const at::Tensor& values, const at::Tensor& scales, const at::Tensor& bits);
  void decode(const SignCodec& codec, const at::Tensor& bits, const at::Tensor& scales, const at::Tensor& values);
  void add(const SignCodec& codec, const at::Tensor& bits, const at::Tensor& scales, const at::Tensor& values);

 private:
  // The arrays of SignDeviceRanges, one behind the other.
  struct Tables {
    at::Tensor memory;  // int64
    int64_t parts = 0;
  };
  Tables tables_on(at::Device device, const SignCodec& codec);
  // give(kernels, ranges, stream) on the device of `values`.
  template <class Give>
  void give_work(const SignCodec& codec, const at::Tensor& values, const Give& give);

  std::mutex mutex_;
  std::map<c10::DeviceIndex, Tables> tables_;
};

}  // namespace ds::compression
