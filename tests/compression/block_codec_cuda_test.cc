// Block quantisation on a GPU, or a simulated one: the kernels of libdsengine_cuda against LibTorch's operators and the
// CPU's loops, bit by bit. Fails where there is no GPU.
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "comm/backends/cuda_plugin.h"
#include "core/numbers/block_codec.h"
#include "core/numbers/block_device_kernels.h"
#include "dsengine/errors.h"
#include "tests/gpu/tested_device.h"

namespace ds {
namespace {

const at::Device kGpu(at::kCUDA, 0);
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNotANumber = std::numeric_limits<float>::quiet_NaN();
const std::vector<int64_t> kLengths = {0, 1, 2, 3, 7, 8, 511, 512, 513, 1023, 1024, 1535, 5001, 262144 + 77};

using Format = std::tuple<int, at::ScalarType>;
class BlockCodecCuda : public ::testing::TestWithParam<Format> {
 protected:
  BlockCodecCuda() : codec(std::get<0>(GetParam())), dtype(std::get<1>(GetParam())) { torch::manual_seed(31); }

  // LibTorch looks once for what its CUDA library offers: that has to be loaded before anything asks.
  void SetUp() override {
    comm::cuda_plugin();
    ASSERT_NE(device_functions<BlockDeviceKernels>(), nullptr)
        << "libdsengine_cuda registers its kernels when it is loaded";
    ASSERT_GT(torch::cuda::device_count(), 0U) << "these tests need a GPU: run them on a machine that has one";
  }

  // Blocks of very different magnitudes, one of zeros, one of very small numbers and some with Inf and NaN among them.
  at::Tensor values_of(int64_t numel) const {
    at::Tensor values = torch::randn({numel}) * torch::exp(torch::arange(numel).div(512, "floor").remainder(7) - 3);
    if (numel > 1024) values.narrow(0, 512, 512).zero_();
    if (numel > 1200) values.narrow(0, 1024, 100).fill_(1e-40);
    if (numel > 3) values[3] = kNotANumber;
    if (numel > 4000) values[3000] = -kInfinity;
    if (numel > 7) values[numel - 1] = kInfinity;
    return values.to(dtype);
  }

  // What is not written would show.
  at::Tensor encoded_by_operators(const at::Tensor& values) const {
    at::Tensor encoded = torch::full({codec.encoded_bytes(values.numel())}, 0xA5, at::kByte);
    codec.encode_by_operators(values, encoded);
    return encoded;
  }
  at::Tensor encoded_on_gpu(const at::Tensor& values) const {
    const auto bytes = torch::dtype(at::kByte).device(kGpu);
    at::Tensor encoded = torch::full({codec.encoded_bytes(values.numel())}, 0xA5, bytes);
    codec.encode(values.to(kGpu), encoded);
    return encoded;
  }

  BlockCodec codec;
  at::ScalarType dtype;
};

// Equal in every bit, to the sign of a zero; one NaN is as another.
::testing::AssertionResult same_bits(const at::Tensor& found, const at::Tensor& expected) {
  const auto bits = [](const at::Tensor& values) {
    const at::Tensor known = at::nan_to_num(values, 0, kInfinity, -kInfinity);
    return known.view(known.element_size() == 4 ? at::kInt : at::kShort);
  };
  const at::Tensor here = found.cpu();
  if (at::equal(bits(here), bits(expected)) && at::equal(here.isnan(), expected.isnan())) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << "found " << here.slice(0, 0, 64) << "expected " << expected.slice(0, 0, 64);
}

TEST_P(BlockCodecCuda, EncodesAsOperatorsDo) {
  for (const int64_t numel : kLengths) {
    const at::Tensor values = values_of(numel);
    const at::Tensor expected = encoded_by_operators(values);
    EXPECT_TRUE(at::equal(encoded_on_gpu(values).cpu(), expected)) << numel;
    at::Tensor by_the_cpu = torch::full_like(expected, 0xA5);
    codec.encode(values, by_the_cpu);
    EXPECT_TRUE(at::equal(by_the_cpu, expected)) << numel;
  }
}

TEST_P(BlockCodecCuda, DecodesAndAddsAsOperatorsDo) {
  for (const int64_t numel : kLengths) {
    std::vector<at::Tensor> parts, parts_there;
    for (int part = 0; part < 5; ++part) {
      parts.push_back(encoded_by_operators(values_of(numel) * (part + 1)));
      parts_there.push_back(parts.back().to(kGpu));
      for (const int divisor : {1, 3}) {
        const at::Tensor expected = torch::full({numel}, 77, dtype), by_the_cpu = torch::full_like(expected, 78);
        codec.decode_sum_by_operators(parts, expected, divisor);
        codec.decode_sum(parts, by_the_cpu, divisor);
        const at::Tensor found = torch::full({numel}, 79, torch::dtype(dtype).device(kGpu));
        codec.decode_sum(parts_there, found, divisor);
        ASSERT_TRUE(same_bits(found, expected)) << numel << " values, " << parts.size() << " parts";
        ASSERT_TRUE(same_bits(by_the_cpu, expected)) << numel << " values, " << parts.size() << " parts";
      }
    }
  }
}

// More than the arguments of a kernel hold: operators take them.
TEST_P(BlockCodecCuda, AddsAnyNumberOfParts) {
  const at::Tensor encoded = encoded_on_gpu(torch::randn({700}).to(dtype));
  for (const int count : {kMostBlockParts, kMostBlockParts + 1}) {
    const std::vector<at::Tensor> parts(static_cast<size_t>(count), encoded);
    const std::vector<at::Tensor> parts_here(static_cast<size_t>(count), encoded.cpu());
    const at::Tensor found = torch::zeros({700}, torch::dtype(dtype).device(kGpu)),
                     expected = torch::zeros({700}, dtype);
    codec.decode_sum(parts, found, count);
    codec.decode_sum(parts_here, expected, count);
    EXPECT_TRUE(same_bits(found, expected)) << count;
  }
}

// Views that begin anywhere in the storage of the values, and at a multiple of four bytes in that of the codes.
TEST_P(BlockCodecCuda, LeavesWhatIsAroundAlone) {
  constexpr int64_t kNumel = 1537;
  for (const int64_t offset : {1, 2, 3}) {
    const at::Tensor around = values_of(kNumel + offset + 1);
    const at::Tensor values = around.narrow(0, offset, kNumel);
    const int64_t bytes = codec.encoded_bytes(kNumel);
    const at::Tensor memory = torch::full({bytes + 4 * offset + 4}, 0xA5, torch::dtype(at::kByte).device(kGpu));
    const at::Tensor encoded = memory.narrow(0, 4 * offset, bytes);
    codec.encode(around.to(kGpu).narrow(0, offset, kNumel), encoded);
    EXPECT_TRUE(at::equal(encoded.cpu(), encoded_by_operators(values.clone())));
    EXPECT_TRUE(memory.narrow(0, 0, 4 * offset).eq(0xA5).all().item<bool>());
    EXPECT_TRUE(memory.narrow(0, 4 * offset + bytes, 4).eq(0xA5).all().item<bool>());
    const at::Tensor whole = torch::full({kNumel + offset + 1}, 77, torch::dtype(dtype).device(kGpu));
    codec.decode(encoded, whole.narrow(0, offset, kNumel));
    EXPECT_TRUE(whole.narrow(0, 0, offset).eq(77).all().item<bool>());
    EXPECT_EQ(whole[offset + kNumel].item<float>(), 77.0F);
  }
}

TEST_P(BlockCodecCuda, RefusesWhatItDoesNotTake) {
  const auto on_gpu = torch::dtype(at::kByte).device(kGpu);
  const at::Tensor values = torch::zeros({600}, torch::dtype(dtype).device(kGpu));
  EXPECT_THROW(codec.encode(values, torch::zeros({codec.encoded_bytes(600)}, at::kByte)), UsageError);
  EXPECT_THROW(codec.encode(values, torch::zeros({codec.encoded_bytes(600) + 4}, on_gpu)), UsageError);
  EXPECT_THROW(codec.encode(values.to(at::kDouble), torch::zeros({codec.encoded_bytes(600)}, on_gpu)), UsageError);
  EXPECT_THROW(codec.decode_sum({}, values), UsageError);
}

// How often an operator of LibTorch is called, on any thread.
std::atomic<int> operators_called;

std::unique_ptr<at::ObserverContext> count_operator(const at::RecordFunction& /*function*/) {
  ++operators_called;
  return nullptr;
}

// Counted are also the views that the codec takes of the tensors it is given.
TEST_P(BlockCodecCuda, NeedsNoOperatorsAndNoMemory) {
  const at::Tensor values = values_of(5001).to(kGpu);
  const at::Tensor encoded = encoded_on_gpu(values.cpu());
  const auto handle = at::addGlobalCallback(at::RecordFunctionCallback(count_operator));
  operators_called = 0;
  codec.encode(values, encoded);
  codec.decode_sum({encoded, encoded, encoded}, values, 3);
  const int called = operators_called;
  at::removeCallback(handle);
  EXPECT_EQ(called, 0);
}

// Work waits behind a copy that a stream of its own was given before.
TEST_P(BlockCodecCuda, WorksOnTheCurrentStream) {
  const c10::impl::VirtualGuardImpl impl(at::kCUDA);
  const at::Tensor start = values_of(100003);
  const at::Tensor expected = encoded_by_operators(start);
  const at::Tensor start_there = start.to(kGpu), values = torch::zeros_like(start_there);
  const at::Tensor encoded = torch::full({expected.numel()}, 0xA5, torch::dtype(at::kByte).device(kGpu));
  impl.getStream(kGpu).synchronize();
  const c10::StreamGuard guard(impl.getStreamFromGlobalPool(kGpu, /*isHighPriority=*/false));
  values.copy_(start_there);
  codec.encode(values, encoded);
  EXPECT_TRUE(at::equal(encoded.cpu(), expected));
}

std::string name_of(const ::testing::TestParamInfo<Format>& info) {
  return std::to_string(std::get<0>(info.param)) + "_bits_" + c10::toString(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(All, BlockCodecCuda,
                         ::testing::Combine(::testing::Values(8, 4),
                                            ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf)),
                         name_of);

}  // namespace
}  // namespace ds
