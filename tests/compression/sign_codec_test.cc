// Signs as bits: against plain tensor code, bit by bit, whatever the instruction set, threads, lengths and gaps.
#include "compression/sign_codec.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/check.h"
#include "tests/compression/sign_codec_checks.h"
#include "tests/optim/vector_targets.h"
#include "tests/support/thrown.h"

namespace ds::compression {
namespace {

using optimizers::WithTarget;

// Comparisons with plain tensor code are many small operators, which only wait for a second thread.
class WithThreads {
 public:
  explicit WithThreads(int count) { at::set_num_threads(count); }
  ~WithThreads() { at::set_num_threads(before_); }
  WithThreads(const WithThreads&) = delete;
  WithThreads& operator=(const WithThreads&) = delete;

 private:
  const int before_ = at::get_num_threads();
};

struct Encoded {
  at::Tensor bits, values;
};

// The format and the arithmetic, as plain tensor code.
at::Tensor signs_of(const at::Tensor& values) { return at::where(values.ge(0), 1.0F, -1.0F).to(at::kFloat); }

void for_each_range_of(const Layout& layout,
                       const std::function<void(int64_t r, int64_t begin, int64_t length)>& body) {
  for (size_t r = 0; r < layout.ranges.size(); ++r) {
    body(static_cast<int64_t>(r), layout.ranges[r].begin, layout.ranges[r].length);
  }
}

Encoded plain_encode(const Layout& layout, const at::Tensor& values, const at::Tensor& scales) {
  Encoded result{torch::zeros({(layout.numel + 7) / 8}, at::kByte), values.clone()};
  auto* bits = result.bits.data_ptr<uint8_t>();
  for_each_range_of(layout, [&](int64_t r, int64_t begin, int64_t length) {
    const at::Tensor signs = signs_of(values.narrow(0, begin, length));
    for (int64_t i = 0; i < length; ++i) {
      if (signs.const_data_ptr<float>()[i] > 0) bits[(begin + i) / 8] |= static_cast<uint8_t>(1 << ((begin + i) % 8));
    }
    result.values.narrow(0, begin, length).sub_(scales[r] * signs);
  });
  return result;
}

at::Tensor plain_sum(const Layout& layout, const at::Tensor& bits, const at::Tensor& scales, const at::Tensor& start) {
  at::Tensor sum = start.clone();
  for_each_range_of(layout, [&](int64_t r, int64_t begin, int64_t length) {
    at::Tensor signs = torch::empty({length});
    for (int64_t i = 0; i < length; ++i) {
      const int byte = bits.const_data_ptr<uint8_t>()[(begin + i) / 8];
      signs.data_ptr<float>()[i] = (byte >> ((begin + i) % 8) & 1) == 1 ? 1.0F : -1.0F;
    }
    sum.narrow(0, begin, length).add_(scales[r] * signs);
  });
  return sum;
}

at::Tensor plain_decode(const Layout& layout, const at::Tensor& bits, const at::Tensor& scales) {
  // -0 + s is s for every s, also for a scale of zero.
  at::Tensor values = plain_sum(layout, bits, scales, torch::full({layout.numel}, -0.0F));
  at::Tensor gaps = torch::ones({layout.numel}, at::kBool);
  for_each_range_of(layout,
                    [&](int64_t, int64_t begin, int64_t length) { gaps.narrow(0, begin, length).fill_(false); });
  return values.masked_fill_(gaps, 0.0);
}

at::Tensor scales_for(const Layout& layout, bool extremes) {
  const auto count = static_cast<int64_t>(layout.ranges.size());
  at::Tensor scales = torch::rand({count});
  if (extremes) {
    const std::vector<float> special = {0.0F, kDenormal, kInf, kNaN, 3e38F};
    for (int64_t r = 0; r < count; r += 2) scales[r] = special[static_cast<size_t>(r + layout.numel) % special.size()];
  }
  return scales;
}

// All three passes, by kernels or by operators, beside plain tensor code.
void expect_plain_results(const Layout& layout, bool extremes, bool operators) {
  const SignCodec codec(layout.ranges, layout.numel);
  ASSERT_EQ(codec.bytes(), (layout.numel + 7) / 8);
  const at::Tensor start = values_of(layout.numel, extremes);
  const at::Tensor scales = scales_for(layout, extremes);
  const Encoded expected = plain_encode(layout, start, scales);

  const at::Tensor values = start.clone();
  const at::Tensor bits = unwritten(codec.bytes(), at::kByte);
  operators ? codec.encode_by_operators(values, scales, bits) : codec.encode(values, scales, bits);
  ASSERT_TRUE(at::equal(bits, expected.bits));
  ASSERT_TRUE(same(values, expected.values));

  const at::Tensor decoded = unwritten(layout.numel, at::kFloat);
  operators ? codec.decode_by_operators(bits, scales, decoded) : codec.decode(bits, scales, decoded);
  ASSERT_TRUE(same(decoded, plain_decode(layout, bits, scales)));

  const at::Tensor sum = start.clone();
  operators ? codec.add_by_operators(bits, scales, sum) : codec.add(bits, scales, sum);
  ASSERT_TRUE(same(sum, plain_sum(layout, bits, scales, start)));
}

void expect_plain_results_of_length(int64_t numel, bool operators) {
  for (const Layout& layout : layouts_of(numel)) {
    for (const bool extremes : {false, true}) {
      SCOPED_TRACE(testing::Message() << numel << " elements in " << layout.ranges.size() << " ranges");
      ASSERT_NO_FATAL_FAILURE(expect_plain_results(layout, extremes, operators));
    }
  }
}

class SignCodecVectors : public testing::TestWithParam<int64_t> {
 protected:
  SignCodecVectors() { torch::manual_seed(7); }
  const WithTarget target_{GetParam()};
  const WithThreads threads_{1};
};

TEST_P(SignCodecVectors, DoWhatPlainTensorCodeDoes) {
  for (int64_t numel = 1; numel <= 200; ++numel) ASSERT_NO_FATAL_FAILURE(expect_plain_results_of_length(numel, false));
  for (const int64_t numel : {1023, 1024, 1025, 32768, 70001, 262144 + 77}) {
    ASSERT_NO_FATAL_FAILURE(expect_plain_results_of_length(numel, false));
  }
}

// Views that begin anywhere in their storage.
TEST_P(SignCodecVectors, NeedNoAlignment) {
  constexpr int64_t kNumel = 1003;
  const Layout layout{{{0, 500}, {504, kNumel - 504}}, kNumel};
  const SignCodec codec(layout.ranges, kNumel);
  const at::Tensor scales = torch::rand({3}).narrow(0, 1, 2);
  for (const int64_t offset : {1, 2, 3, 5}) {
    const at::Tensor values = values_of(kNumel + offset, true).narrow(0, offset, kNumel);
    const at::Tensor around = unwritten(codec.bytes() + offset + 1, at::kByte);
    const at::Tensor bits = around.narrow(0, offset, codec.bytes());
    const Encoded expected = plain_encode(layout, values, scales);
    codec.encode(values, scales, bits);
    EXPECT_TRUE(at::equal(bits, expected.bits));
    EXPECT_TRUE(same(values, expected.values));
    EXPECT_EQ(around[offset - 1].item<int>(), 0xA5);
    EXPECT_EQ(around[offset + codec.bytes()].item<int>(), 0xA5);
    codec.decode(bits, scales, values);
    EXPECT_TRUE(same(values, plain_decode(layout, bits, scales)));
  }
}

TEST_P(SignCodecVectors, EncodeWhatTheyDecoded) {
  for (const int64_t numel : {1, 7, 8, 9, 64, 1000, 4099, 262147}) {
    const SignCodec codec({{0, numel}}, numel);
    const at::Tensor bits = torch::randint(256, {codec.bytes()}, at::kByte);
    if (numel % 8 != 0) bits[-1].bitwise_and_((1 << (numel % 8)) - 1);
    const at::Tensor scale = torch::full({1}, 0.25F);
    const at::Tensor values = unwritten(numel, at::kFloat);
    codec.decode(bits, scale, values);
    const at::Tensor again = unwritten(codec.bytes(), at::kByte);
    codec.encode(values, scale, again);
    EXPECT_TRUE(at::equal(again, bits)) << numel;
    EXPECT_EQ(values.count_nonzero().item<int64_t>(), 0) << "bits that carry all leave nothing";
  }
}

TEST_P(SignCodecVectors, ScalesAreRootMeanSquares) {
  for (const int64_t numel : {1, 2, 9, 200, 65536, 65537, 200003}) {
    for (const Layout& layout : layouts_of(numel)) {
      const SignCodec codec(layout.ranges, numel);
      for (const double size : {1e-30, 1.0, 1e30}) {  // squares that float32 cannot hold
        const at::Tensor values = torch::randn({numel}) * size;
        const at::Tensor scales = unwritten(codec.range_count(), at::kFloat);
        const at::Tensor by_operators = unwritten(codec.range_count(), at::kFloat);
        codec.scales(values, scales);
        codec.scales_by_operators(values, by_operators);
        for_each_range_of(layout, [&](int64_t r, int64_t begin, int64_t length) {
          const at::Tensor exact = values.narrow(0, begin, length).to(at::kDouble);
          const double expected = length == 0 ? 0 : std::sqrt(exact.square().mean().item<double>());
          EXPECT_NEAR(scales[r].item<double>(), expected, 6e-8 * expected);  // half a unit in the last place
          EXPECT_NEAR(by_operators[r].item<double>(), expected, 6e-8 * expected);
        });
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, SignCodecVectors, testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& test) { return std::string(hwy::TargetName(test.param)); });

TEST(SignCodec, OperatorsDoWhatPlainTensorCodeDoes) {
  const WithThreads alone(1);
  torch::manual_seed(11);
  for (int64_t numel = 1; numel <= 40; ++numel) ASSERT_NO_FATAL_FAILURE(expect_plain_results_of_length(numel, true));
  for (const int64_t numel : {200, 1025, 70001}) ASSERT_NO_FATAL_FAILURE(expect_plain_results_of_length(numel, true));
}

// More than operators take at a time.
TEST(SignCodec, KernelsAndOperatorsGiveTheSameBits) {
  torch::manual_seed(12);
  expect_kernels_like_operators(at::kCPU);
}

TEST(SignCodec, ThreadsDoNotChangeABit) {
  torch::manual_seed(13);
  constexpr int64_t kNumel = 600011;
  std::vector<ScaleRange> ranges;
  for (int64_t begin = 0; begin < 200000; begin += 64) ranges.push_back({begin, 64 - begin / 64 % 9});
  ranges.push_back({200000, 300001});
  ranges.push_back({500008, kNumel - 500008});
  const SignCodec codec(ranges, kNumel);
  const at::Tensor start = torch::randn({kNumel});
  struct Results {
    at::Tensor scales, bits, rest, decoded, sum;
  };
  const auto results_on = [&](int count) {
    const WithThreads threads(count);
    Results all{unwritten(codec.range_count(), at::kFloat), unwritten(codec.bytes(), at::kByte), start.clone(),
                unwritten(kNumel, at::kFloat), start.clone()};
    codec.scales(start, all.scales);
    codec.encode(all.rest, all.scales, all.bits);
    codec.decode(all.bits, all.scales, all.decoded);
    codec.add(all.bits, all.scales, all.sum);
    return all;
  };
  const Results alone = results_on(1);
  EXPECT_TRUE(same(alone.rest, plain_encode({ranges, kNumel}, start, alone.scales).values));
  for (const int count : {2, 3}) {
    const Results together = results_on(count);
    EXPECT_TRUE(at::equal(together.scales, alone.scales)) << count;
    EXPECT_TRUE(at::equal(together.bits, alone.bits)) << count;
    EXPECT_TRUE(at::equal(together.rest, alone.rest)) << count;
    EXPECT_TRUE(at::equal(together.decoded, alone.decoded)) << count;
    EXPECT_TRUE(at::equal(together.sum, alone.sum)) << count;
  }
}

TEST(SignCodec, ShowsOverflow) {
  const SignCodec codec({{0, 8}, {8, 8}, {16, 8}}, 24);
  const at::Tensor values = torch::ones({24});
  values[3] = kInf;
  values[9] = kNaN;
  const at::Tensor scales = torch::empty({3});
  codec.scales(values, scales);
  EXPECT_EQ(scales[0].item<float>(), kInf);
  EXPECT_TRUE(std::isnan(scales[1].item<float>()));
  EXPECT_EQ(scales[2].item<float>(), 1.0F);
  const at::Tensor bits = torch::empty({3}, at::kByte);
  codec.encode(values, scales, bits);
  codec.decode(bits, scales, values);
  EXPECT_TRUE(values.narrow(0, 0, 8).isinf().all().item<bool>());
  EXPECT_TRUE(values.narrow(0, 8, 8).isnan().all().item<bool>());
  EXPECT_TRUE(values.narrow(0, 16, 8).eq(1).all().item<bool>());
}

TEST(SignCodec, TakesNothing) {
  for (const Layout& layout : {Layout{{}, 0}, Layout{{{0, 0}}, 0}, Layout{{}, 20}, Layout{{{8, 0}, {8, 0}}, 20}}) {
    const SignCodec codec(layout.ranges, layout.numel);
    for (const bool operators : {false, true}) {
      const at::Tensor start = torch::randn({layout.numel});
      const at::Tensor values = start.clone();
      const at::Tensor scales = unwritten(codec.range_count(), at::kFloat);
      const at::Tensor bits = unwritten(codec.bytes(), at::kByte);
      operators ? codec.scales_by_operators(values, scales) : codec.scales(values, scales);
      EXPECT_EQ(scales.count_nonzero().item<int64_t>(), 0);
      operators ? codec.encode_by_operators(values, scales, bits) : codec.encode(values, scales, bits);
      EXPECT_EQ(bits.count_nonzero().item<int64_t>(), 0);
      operators ? codec.add_by_operators(bits, scales, values) : codec.add(bits, scales, values);
      EXPECT_TRUE(at::equal(values, start));
      operators ? codec.decode_by_operators(bits, scales, values) : codec.decode(bits, scales, values);
      EXPECT_EQ(values.count_nonzero().item<int64_t>(), 0);
    }
  }
}

std::string refusal(const std::function<void()>& call) { return test::thrown_by<UsageError>(call, "not refused"); }

TEST(SignCodec, RefusesRangesThatDoNotFit) {
  EXPECT_NE(refusal([] { SignCodec({{0, 4}, {4, 4}}, 16); }).find("multiple of 8"), std::string::npos);
  for (const Layout& layout : {Layout{{}, -1}, Layout{{{0, 17}}, 16}, Layout{{{8, 9}}, 16}, Layout{{{24, 0}}, 16},
                               Layout{{{-8, 8}}, 16}, Layout{{{0, -1}}, 16}, Layout{{{0, 9}, {8, 8}}, 16},
                               Layout{{{8, 8}, {0, 8}}, 16}, Layout{{{8, std::numeric_limits<int64_t>::max()}}, 16}}) {
    EXPECT_NE(refusal([&] { SignCodec(layout.ranges, layout.numel); }).find("expected"), std::string::npos);
  }
}

TEST(SignCodec, RefusesTensorsThatDoNotFit) {
  const SignCodec codec({{0, 8}, {8, 9}}, 17);
  const at::Tensor values = torch::zeros({17}), scales = torch::zeros({2}), bits = torch::zeros({3}, at::kByte);
  const auto refuses = [&](const at::Tensor& bad_values, const at::Tensor& bad_scales, const at::Tensor& bad_bits) {
    using Call = std::function<void()>;
    for (const Call& call : {Call([&] { codec.encode(bad_values, bad_scales, bad_bits); }),
                             Call([&] { codec.decode(bad_bits, bad_scales, bad_values); }),
                             Call([&] { codec.add(bad_bits, bad_scales, bad_values); }),
                             Call([&] { codec.encode_by_operators(bad_values, bad_scales, bad_bits); }),
                             Call([&] { codec.decode_by_operators(bad_bits, bad_scales, bad_values); }),
                             Call([&] { codec.add_by_operators(bad_bits, bad_scales, bad_values); })}) {
      EXPECT_NE(refusal(call).find("expected contiguous"), std::string::npos);
    }
  };
  const at::Tensor no_tensor;
  for (const at::Tensor& bad : {no_tensor, torch::zeros({16}), torch::zeros({17}, at::kDouble),
                                torch::zeros({17, 2}).select(1, 0), torch::zeros({17}, at::kMeta)}) {
    refuses(bad, scales, bits);
    EXPECT_NE(refusal([&] { codec.scales(bad, scales); }).find("expected contiguous"), std::string::npos);
  }
  for (const at::Tensor& bad : {no_tensor, torch::zeros({3}), torch::zeros({2}, at::kDouble),
                                torch::zeros({2, 2}).select(1, 0), torch::zeros({2}, at::kMeta)}) {
    refuses(values, bad, bits);
    EXPECT_NE(refusal([&] { codec.scales(values, bad); }).find("expected contiguous"), std::string::npos);
  }
  for (const at::Tensor& bad :
       {no_tensor, torch::zeros({2}, at::kByte), torch::zeros({3}, at::kChar),
        torch::zeros({3, 2}, at::kByte).select(1, 0), torch::zeros({3}, torch::dtype(at::kByte).device(at::kMeta))}) {
    refuses(values, scales, bad);
  }
}

TEST(SignCodec, RecordsNoGradients) {
  const SignCodec codec({{0, 9}}, 9);
  const at::Tensor values = torch::randn({9}).requires_grad_();
  const at::Tensor scales = torch::empty({1}), bits = torch::empty({2}, at::kByte);
  codec.scales(values, scales);
  codec.encode(values, scales, bits);
  codec.scales_by_operators(values, scales);
  codec.encode_by_operators(values, scales, bits);
  EXPECT_FALSE(scales.requires_grad());
  EXPECT_TRUE(values.is_leaf());
}

}  // namespace
}  // namespace ds::compression
