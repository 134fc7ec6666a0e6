// Signs as bits on a GPU, or a simulated one: the kernels of libdsengine_cuda against the CPU's, bit by bit. Fails
// where there is no GPU.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <vector>

#include "comm/backends/cuda_plugin.h"
#include "compression/sign_codec.h"
#include "compression/sign_device_kernels.h"
#include "tests/compression/sign_codec_checks.h"
#include "tests/gpu/tested_device.h"

namespace ds::compression {
namespace {

class SignCodecCuda : public ::testing::Test {
 protected:
  // LibTorch looks once for what its CUDA library offers: that has to be loaded before anything asks.
  void SetUp() override {
    comm::cuda_plugin();
    ASSERT_NE(device_functions<SignDeviceKernels>(), nullptr)
        << "libdsengine_cuda registers its kernels when it is loaded";
    ASSERT_GT(torch::cuda::device_count(), 0U) << "these tests need a GPU: run them on a machine that has one";
  }
};

const at::Device kGpu(at::kCUDA, 0);

at::Tensor scales_for(const Layout& layout) {
  const auto count = static_cast<int64_t>(layout.ranges.size());
  at::Tensor scales = torch::rand({count});
  const std::vector<float> special = {0.0F, kDenormal, kInf, kNaN, 3e38F};
  for (int64_t r = 1; r < count; r += 2) scales[r] = special[static_cast<size_t>(r + layout.numel) % special.size()];
  return scales;
}

void expect_what_the_cpu_does(const Layout& layout) {
  SCOPED_TRACE(::testing::Message() << layout.numel << " elements in " << layout.ranges.size() << " ranges");
  const SignCodec codec(layout.ranges, layout.numel);
  const at::Tensor start = values_of(layout.numel, true);
  const at::Tensor scales = scales_for(layout);
  const at::Tensor scales_there = scales.to(kGpu);

  const at::Tensor rest = start.clone(), rest_there = start.to(kGpu);
  const at::Tensor bits = unwritten(codec.bytes(), at::kByte), bits_there = unwritten(codec.bytes(), at::kByte, kGpu);
  codec.encode(rest, scales, bits);
  codec.encode(rest_there, scales_there, bits_there);
  ASSERT_TRUE(at::equal(bits_there.cpu(), bits));
  ASSERT_TRUE(same(rest_there, rest));

  const at::Tensor decoded = unwritten(layout.numel, at::kFloat);
  const at::Tensor decoded_there = unwritten(layout.numel, at::kFloat, kGpu);
  codec.decode(bits, scales, decoded);
  codec.decode(bits_there, scales_there, decoded_there);
  ASSERT_TRUE(same(decoded_there, decoded));

  const at::Tensor sum = start.clone(), sum_there = start.to(kGpu);
  codec.add(bits, scales, sum);
  codec.add(bits_there, scales_there, sum_there);
  ASSERT_TRUE(same(sum_there, sum));
}

// Around tiles and parts too.
TEST_F(SignCodecCuda, DoesWhatTheCpuDoes) {
  torch::manual_seed(21);
  for (int64_t numel = 0; numel <= 200; ++numel) {
    for (const Layout& layout : layouts_of(numel)) ASSERT_NO_FATAL_FAILURE(expect_what_the_cpu_does(layout));
  }
  for (const int64_t about : {kSignTile, 2 * kSignTile, kSignPart, int64_t{70000}, int64_t{1} << 20}) {
    for (const int64_t numel : {about - 1, about, about + 1, about + 77}) {
      for (const Layout& layout : layouts_of(numel)) ASSERT_NO_FATAL_FAILURE(expect_what_the_cpu_does(layout));
    }
  }
}

// More ranges than a kernel has blocks.
TEST_F(SignCodecCuda, TakesAnyNumberOfRanges) {
  torch::manual_seed(22);
  Layout layout;
  for (int64_t r = 0; r < 200000; ++r) layout.ranges.push_back({16 * r, r % 17});
  layout.numel = 16 * 200000;
  ASSERT_NO_FATAL_FAILURE(expect_what_the_cpu_does(layout));
  const SignCodec codec(layout.ranges, layout.numel);
  const at::Tensor values = torch::randn({layout.numel});
  const at::Tensor scales = unwritten(codec.range_count(), at::kFloat);
  const at::Tensor scales_there = unwritten(codec.range_count(), at::kFloat, kGpu);
  codec.scales(values, scales);
  codec.scales(values.to(kGpu), scales_there);
  EXPECT_TRUE(at::allclose(scales_there.cpu(), scales, 1.2e-7, 0));
}

// Views that begin anywhere in their storage.
TEST_F(SignCodecCuda, NeedsNoAlignment) {
  torch::manual_seed(23);
  constexpr int64_t kNumel = 10003;
  const SignCodec codec({{0, 500}, {504, kNumel - 504}}, kNumel);
  const at::Tensor scales = torch::rand({3}).narrow(0, 1, 2);
  const at::Tensor scales_there = torch::cat({torch::ones({1}), scales}).to(kGpu).narrow(0, 1, 2);
  for (const int64_t offset : {1, 2, 3, 5}) {
    const at::Tensor start = values_of(kNumel + offset + 1, true);
    const at::Tensor whole = start.to(kGpu);
    const at::Tensor rest = start.narrow(0, offset, kNumel).clone(), rest_there = whole.narrow(0, offset, kNumel);
    const at::Tensor around = unwritten(codec.bytes() + offset + 1, at::kByte, kGpu);
    const at::Tensor bits = unwritten(codec.bytes(), at::kByte);
    const at::Tensor bits_there = around.narrow(0, offset, codec.bytes());
    codec.encode(rest, scales, bits);
    codec.encode(rest_there, scales_there, bits_there);
    EXPECT_TRUE(at::equal(bits_there.cpu(), bits));
    EXPECT_TRUE(same(rest_there, rest));
    codec.decode(bits, scales, rest);
    codec.decode(bits_there, scales_there, rest_there);
    EXPECT_TRUE(same(rest_there, rest));
    EXPECT_TRUE(same(whole.narrow(0, 0, offset), start.narrow(0, 0, offset)));
    EXPECT_TRUE(same(whole.narrow(0, kNumel + offset, 1), start.narrow(0, kNumel + offset, 1)));
    EXPECT_TRUE(around.narrow(0, 0, offset).eq(0xA5).all().item<bool>());
    EXPECT_EQ(around[offset + codec.bytes()].item<int>(), 0xA5);
  }
}

TEST_F(SignCodecCuda, ScalesAreRootMeanSquares) {
  torch::manual_seed(24);
  for (const int64_t numel : {int64_t{1}, int64_t{2}, int64_t{9}, int64_t{200}, kSignPart, kSignPart + 1,
                              int64_t{200003}, 300 * kSignPart + 5}) {
    for (const Layout& layout : layouts_of(numel)) {
      if (layout.ranges.size() > 100) continue;  // TakesAnyNumberOfRanges
      const SignCodec codec(layout.ranges, numel);
      for (const double size : {1e-30, 1.0, 1e30}) {  // squares that float32 cannot hold
        const at::Tensor values = torch::randn({numel}) * size;
        const at::Tensor there = values.to(kGpu);
        const at::Tensor first = unwritten(codec.range_count(), at::kFloat, kGpu), second = first.clone();
        codec.scales(there, first);
        codec.scales(there, second);
        EXPECT_TRUE(at::equal(first, second)) << "sums have one order";
        for (size_t r = 0; r < layout.ranges.size(); ++r) {
          const ScaleRange& range = layout.ranges[r];
          const at::Tensor exact = values.narrow(0, range.begin, range.length).to(at::kDouble);
          const double expected = range.length == 0 ? 0 : std::sqrt(exact.square().mean().item<double>());
          // Half a unit in the last place.
          EXPECT_NEAR(first[static_cast<int64_t>(r)].item<double>(), expected, 6e-8 * expected) << numel << ", " << r;
        }
      }
    }
  }
}

TEST_F(SignCodecCuda, ShowsOverflow) {
  const SignCodec codec({{0, 8}, {8, 8}, {16, 8}}, 24);
  at::Tensor values = torch::ones({24});
  values[3] = kInf;
  values[9] = kNaN;
  values = values.to(kGpu);
  const at::Tensor scales = unwritten(3, at::kFloat, kGpu), bits = unwritten(3, at::kByte, kGpu);
  codec.scales(values, scales);
  EXPECT_EQ(scales[0].item<float>(), kInf);
  EXPECT_TRUE(std::isnan(scales[1].item<float>()));
  EXPECT_EQ(scales[2].item<float>(), 1.0F);
  codec.encode(values, scales, bits);
  codec.decode(bits, scales, values);
  EXPECT_TRUE(values.narrow(0, 0, 8).isinf().all().item<bool>());
  EXPECT_TRUE(values.narrow(0, 8, 8).isnan().all().item<bool>());
  EXPECT_TRUE(values.narrow(0, 16, 8).eq(1).all().item<bool>());
}

TEST_F(SignCodecCuda, DoesWhatOperatorsDoOnTheGpu) {
  torch::manual_seed(25);
  expect_kernels_like_operators(kGpu);
}

// Each round's work waits behind a long one on a stream of its own; the codec ends before the work does.
TEST_F(SignCodecCuda, WorksOnTheCurrentStream) {
  torch::manual_seed(26);
  constexpr int64_t kNumel = (1 << 20) + 3;
  const c10::impl::VirtualGuardImpl impl(at::kCUDA);
  const at::Tensor start = torch::randn({kNumel});
  const at::Tensor scale = torch::full({1}, 0.5F), bits = unwritten((kNumel + 7) / 8, at::kByte);
  const at::Tensor rest = start.clone();
  SignCodec({{0, kNumel}}, kNumel).encode(rest, scale, bits);
  for (int round = 0; round < 4; ++round) {
    const c10::Stream stream = impl.getStreamFromGlobalPool(kGpu, /*isHighPriority=*/false);
    const c10::StreamGuard guard(stream);
    const at::Tensor start_there = start.to(kGpu), scale_there = scale.to(kGpu);
    const int64_t side = test::device_is_simulated() ? 64 : 4096;
    at::Tensor matrix = torch::rand({side, side}, kGpu) / side;
    const at::Tensor rest_there = torch::zeros({kNumel}, kGpu), bits_there = unwritten(bits.numel(), at::kByte, kGpu);
    stream.synchronize();
    for (int i = 0; i < 20; ++i) matrix = matrix.matmul(matrix);
    rest_there.copy_(start_there).add_(matrix[0][0], 0);
    SignCodec({{0, kNumel}}, kNumel).encode(rest_there, scale_there, bits_there);
    EXPECT_TRUE(same(rest_there, rest));
    EXPECT_TRUE(at::equal(bits_there.cpu(), bits));
  }
}

// 9 GiB on the GPU.
TEST_F(SignCodecCuda, CountsBeyond32Bits) {
  if (test::device_is_simulated()) GTEST_SKIP() << "the kernels of a GPU count, and the memory here is the host's";
  constexpr int64_t kNumel = (int64_t{1} << 31) + 4099;
  constexpr int64_t kSecond = (int64_t{1} << 31) + 8;
  const SignCodec codec({{0, kSecond - 8}, {kSecond, kNumel - kSecond}}, kNumel);
  const at::Tensor bits = torch::randint(256, {codec.bytes()}, torch::dtype(at::kByte).device(kGpu));
  bits[kSecond / 8 - 1].fill_(0);
  bits[-1].bitwise_and_(7);
  const at::Tensor scales = torch::tensor({0.25F, 4.0F}, kGpu);
  const at::Tensor values = unwritten(kNumel, at::kFloat, kGpu);
  codec.decode(bits, scales, values);
  EXPECT_TRUE(values.narrow(0, kSecond, kNumel - kSecond).abs().eq(4).all().item<bool>());
  EXPECT_EQ(values.narrow(0, kSecond - 8, 8).count_nonzero().item<int64_t>(), 0);
  EXPECT_TRUE(values.narrow(0, kSecond - 1000008, 1000000).abs().eq(0.25).all().item<bool>());
  const at::Tensor found = unwritten(2, at::kFloat, kGpu);
  codec.scales(values, found);
  EXPECT_TRUE(at::equal(found, scales));
  const at::Tensor again = unwritten(codec.bytes(), at::kByte, kGpu);
  codec.encode(values, scales, again);
  EXPECT_TRUE(at::equal(again, bits));
  EXPECT_EQ(values.count_nonzero().item<int64_t>(), 0) << "bits that carry all leave nothing";
  codec.add(bits, scales, values);
  EXPECT_TRUE(values.narrow(0, kSecond, kNumel - kSecond).abs().eq(4).all().item<bool>());
}

}  // namespace
}  // namespace ds::compression
