// Block quantisation: the format, the error bound, what is not finite, and one result from both ways to compute it.
#include "core/numbers/block_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "core/check.h"

namespace ds {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
const std::vector<int64_t> kLengths = {0, 1, 2, 3, 7, 511, 512, 513, 1023, 1024, 1535, 5001, 262144 + 77};

at::Tensor encoded_by(const BlockCodec& codec, const at::Tensor& values, bool operators = false) {
  // What is not written would show.
  at::Tensor encoded = torch::full({codec.encoded_bytes(values.numel())}, 0xA5, at::kByte);
  operators ? codec.encode_by_operators(values, encoded) : codec.encode(values, encoded);
  return encoded;
}

at::Tensor through(const BlockCodec& codec, const at::Tensor& values) {
  at::Tensor decoded = torch::full_like(values, 77);
  codec.decode(encoded_by(codec, values), decoded);
  return decoded;
}

// Largest magnitude / levels of each value's block, in float64.
at::Tensor scales_by_value(const at::Tensor& values, int levels) {
  at::Tensor scales = torch::zeros({values.numel()}, at::kDouble);
  for (int64_t begin = 0; begin < values.numel(); begin += BlockCodec::kBlock) {
    const int64_t count = std::min(BlockCodec::kBlock, values.numel() - begin);
    const at::Tensor block = values.narrow(0, begin, count).to(at::kDouble);
    scales.narrow(0, begin, count).fill_(block.abs().max() / levels);
  }
  return scales;
}

// Blocks of very different magnitudes, one of zeros among them.
at::Tensor uneven_values(int64_t numel, at::ScalarType dtype) {
  at::Tensor values = torch::randn({numel}) * torch::exp(torch::arange(numel).div(512, "floor").remainder(7) - 3);
  if (numel > 1024) values.narrow(0, 512, 512).zero_();
  return values.to(dtype);
}

using Format = std::tuple<int, at::ScalarType>;
class BlockCodecFormat : public ::testing::TestWithParam<Format> {
 protected:
  BlockCodecFormat() : codec(std::get<0>(GetParam())), dtype(std::get<1>(GetParam())) { torch::manual_seed(5); }
  BlockCodec codec;
  at::ScalarType dtype;
};

TEST_P(BlockCodecFormat, ErrorStaysBelowHalfAScale) {
  // The type's own rounding of the decoded value comes on top, float32's for the largest quotient.
  const double rounding = dtype == at::kFloat ? 1e-6 : dtype == at::kBFloat16 ? 1.0 / 256 : 1.0 / 2048;
  for (const int64_t numel : kLengths) {
    const at::Tensor values = uneven_values(numel, dtype);
    const at::Tensor error = (through(codec, values).to(at::kDouble) - values.to(at::kDouble)).abs();
    const at::Tensor bound =
        scales_by_value(values, codec.levels()) * 0.50001 + values.to(at::kDouble).abs() * 1.25 * rounding + 1e-7;
    EXPECT_TRUE((error <= bound).all().item<bool>()) << numel;
    if (numel > 5000) {
      EXPECT_GT((error / scales_by_value(values, codec.levels()).clamp_min(1e-30)).max().item<double>(), 0.45)
          << "nothing was rounded";
    }
  }
}

TEST_P(BlockCodecFormat, BothWaysGiveTheSameBits) {
  for (const int64_t numel : kLengths) {
    at::Tensor values = uneven_values(numel, dtype);
    if (numel > 3) {
      values[3] = kNaN;
      values[numel - 1] = kInf;
    }
    if (numel > 1200) values.narrow(0, 1024, 100).fill_(1e-40);
    const at::Tensor encoded = encoded_by(codec, values);
    EXPECT_TRUE(torch::equal(encoded, encoded_by(codec, values, true))) << numel;

    const std::vector<at::Tensor> parts = {encoded, encoded_by(codec, uneven_values(numel, dtype)),
                                           encoded_by(codec, uneven_values(numel, dtype))};
    for (const int divisor : {1, 3}) {
      at::Tensor sum = torch::full({numel}, 77, dtype);
      at::Tensor sum_by_operators = torch::full({numel}, 78, dtype);
      codec.decode_sum(parts, sum, divisor);
      codec.decode_sum_by_operators(parts, sum_by_operators, divisor);
      EXPECT_TRUE(torch::equal(sum.isnan(), sum_by_operators.isnan())) << numel;
      EXPECT_TRUE(torch::equal(sum.nan_to_num(1), sum_by_operators.nan_to_num(1))) << numel;
    }
  }
}

TEST_P(BlockCodecFormat, SumsAreThoseOfTheDecodedPartsInOrder) {
  const int64_t numel = 3001;
  std::vector<at::Tensor> parts;
  at::Tensor wanted;
  for (int part = 0; part < 4; ++part) {
    parts.push_back(encoded_by(codec, uneven_values(numel, dtype)));
    at::Tensor decoded = torch::empty({numel});  // float32, whatever was encoded
    codec.decode(parts.back(), decoded);
    wanted = part == 0 ? decoded : wanted + decoded;
    at::Tensor sum = torch::empty({numel}, dtype);
    codec.decode_sum(parts, sum, part + 1);
    EXPECT_TRUE(torch::equal(sum, (wanted / (part + 1)).to(dtype))) << part;
  }
}

TEST_P(BlockCodecFormat, MultiplesOfAPowerOfTwoSurviveExactly) {
  // Levels of a scale of 1/4, with the largest one in every block.
  at::Tensor values = torch::randint(-codec.levels(), codec.levels() + 1, {2000}).to(at::kFloat);
  for (const int64_t i : {0, 600, 1100, 1999}) values[i] = i % 200 == 0 ? codec.levels() : -codec.levels();
  const at::Tensor error = (through(codec, (values / 4).to(dtype)).to(at::kFloat) * 4 - values).abs();
  EXPECT_LT(error.max().item<float>(), dtype == at::kFloat ? 2e-5F : 1e-9F);
}

TEST_P(BlockCodecFormat, ZerosStayZerosAndTinyMagnitudesBecomeZeros) {
  for (const double tiny : {0.0, -0.0, 1e-44, -9e-38}) {
    const at::Tensor values = torch::full({700}, tiny).to(dtype);
    EXPECT_EQ(through(codec, values).abs().max().item<double>(), 0.0) << tiny;
  }
  if (dtype == at::kHalf) return;
  const at::Tensor small = torch::full({700}, 2e-36).to(dtype);
  EXPECT_NEAR(through(codec, small)[699].item<double>() / small[699].item<double>(), 1.0, 1e-2);
}

TEST_P(BlockCodecFormat, TheLargestFiniteValuesStayFinite) {
  const double largest = dtype == at::kHalf ? 65504 : dtype == at::kFloat ? 3.4028234e38 : 3.3895313892515355e38;
  const at::Tensor values = torch::tensor({largest, -largest, largest / 2, 0.0}, at::kDouble).to(dtype);
  const at::Tensor decoded = through(codec, values);
  EXPECT_TRUE(decoded.isfinite().all().item<bool>()) << decoded;
  EXPECT_NEAR(decoded[1].item<double>() / largest, -1.0, 1e-6);
}

TEST_P(BlockCodecFormat, WhatIsNotFiniteStaysSoAndLeavesOtherBlocksAlone) {
  for (const float bad : {kInf, -kInf, kNaN, -kNaN}) {
    for (const int64_t place : {0, 700, 1535, 1536, 1600}) {
      at::Tensor values = torch::randn({1601}).to(dtype);
      const at::Tensor clean = through(codec, values);
      values[place] = bad;
      const at::Tensor decoded = through(codec, values);
      const int64_t begin = place / 512 * 512;
      const int64_t count = std::min<int64_t>(512, 1601 - begin);
      EXPECT_TRUE(decoded.narrow(0, begin, count).isnan().all().item<bool>()) << bad << " at " << place;
      at::Tensor rest = decoded.clone();
      rest.narrow(0, begin, count).copy_(clean.narrow(0, begin, count));
      EXPECT_TRUE(torch::equal(rest, clean));
      at::Tensor sum = torch::empty({1601}, dtype);
      codec.decode_sum({encoded_by(codec, torch::ones({1601}, dtype)), encoded_by(codec, values)}, sum, 2);
      EXPECT_TRUE(torch::equal(sum.isnan(), decoded.isnan()));
    }
  }
}

TEST_P(BlockCodecFormat, PartsLieOneAfterAnotherInOneTensor) {
  const int64_t bytes = codec.encoded_bytes(1001);
  at::Tensor all = torch::full({3 * bytes}, 0xA5, at::kByte);
  std::vector<at::Tensor> values;
  for (int part = 0; part < 3; ++part) {
    values.push_back(torch::randn({7, 143}).to(dtype));
    codec.encode(values.back(), all.narrow(0, part * bytes, bytes));
  }
  for (int part = 0; part < 3; ++part) {
    at::Tensor decoded = torch::empty({7, 143}, dtype);
    codec.decode(all.narrow(0, part * bytes, bytes), decoded);
    EXPECT_TRUE(torch::equal(decoded, through(codec, values[static_cast<size_t>(part)])));
  }
}

TEST_P(BlockCodecFormat, ThreadsDoNotChangeBits) {
  const at::Tensor values = uneven_values(300 * 512 + 5, dtype);
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const at::Tensor encoded = encoded_by(codec, values);
  const at::Tensor decoded = through(codec, values);
  at::set_num_threads(3);
  EXPECT_TRUE(torch::equal(encoded, encoded_by(codec, values)));
  EXPECT_TRUE(torch::equal(decoded, through(codec, values)));
  at::set_num_threads(threads);
}

INSTANTIATE_TEST_SUITE_P(Formats, BlockCodecFormat,
                         ::testing::Combine(::testing::Values(8, 4),
                                            ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf)));

TEST(BlockCodec, TheEncodedFormIsAsDocumented) {
  const at::Tensor values = torch::tensor({14.0F, -14.0F, 3.0F, 5.0F, -2.1F});  // a scale of 2: ties to even
  const at::Tensor four = encoded_by(BlockCodec(4), values);
  ASSERT_EQ(four.numel(), 3 + 1 + 4);
  EXPECT_EQ(four.narrow(0, 4, 4).view(at::kFloat)[0].item<float>(), 14.0F * (1.0F / 7));
  // 7 and 2 (2.5), -7 and -1, 2 (1.5) and nothing; each plus 8.
  EXPECT_TRUE(
      torch::equal(four.narrow(0, 0, 4), torch::tensor({15 | (10 << 4), 1 | (7 << 4), 10 | (8 << 4), 0}, at::kByte)));
  const at::Tensor eight = encoded_by(BlockCodec(8), torch::tensor({127.0F, -127.0F, 2.4F, -1.0F, 0.0F}));
  ASSERT_EQ(eight.numel(), 8 + 4);
  EXPECT_TRUE(torch::equal(eight.narrow(0, 0, 8), torch::tensor({127, 129, 2, 255, 0, 0, 0, 0}, at::kByte)));
}

// The codec converts float16 by itself.
TEST(BlockCodec, EveryFloat16IsReadAndWrittenAsLibTorchDoes) {
  const BlockCodec codec(8);
  const at::Tensor halves = torch::arange(65536).to(at::kShort).view(at::kHalf);  // every pattern of bits
  const at::Tensor floats = halves.to(at::kFloat);
  EXPECT_TRUE(torch::equal(encoded_by(codec, halves), encoded_by(codec, floats)));
  const at::Tensor values = torch::cat({floats, floats * 1.0004883F, floats * 0.99975586F, torch::randn({100000})});
  at::Tensor decoded = torch::empty({values.numel()});
  at::Tensor as_half = torch::empty({values.numel()}, at::kHalf);
  for (const double factor : {1.0, 1e-3, 1e-6, 3e-8, 0.4999, 17.0}) {
    const at::Tensor encoded = encoded_by(codec, values * factor);
    codec.decode(encoded, decoded);
    codec.decode(encoded, as_half);
    EXPECT_TRUE(torch::equal(as_half.isnan(), decoded.isnan()));
    EXPECT_TRUE(torch::equal(as_half.nan_to_num(1), decoded.to(at::kHalf).nan_to_num(1))) << factor;
  }
}

TEST(BlockCodec, SizesAreAQuarterAndAnEighthOfFloat32) {
  EXPECT_EQ(BlockCodec(8).encoded_bytes(0), 0);
  EXPECT_EQ(BlockCodec(8).encoded_bytes(1), 4 + 4);
  EXPECT_EQ(BlockCodec(8).encoded_bytes(512), 512 + 4);
  EXPECT_EQ(BlockCodec(8).encoded_bytes(513), 516 + 8);
  EXPECT_EQ(BlockCodec(4).encoded_bytes(513), 260 + 8);
  EXPECT_EQ(BlockCodec(4).encoded_bytes(1 << 20), (1 << 19) + 4 * 2048);
}

TEST(BlockCodec, WrongTensorsAreNamed) {
  const BlockCodec codec(8);
  const at::Tensor values = torch::randn({600});
  const at::Tensor encoded = torch::empty({codec.encoded_bytes(600)}, at::kByte);
  const at::Tensor more = torch::empty({codec.encoded_bytes(600) + 1}, at::kByte);
  const auto error_of = [&](const at::Tensor& from, const at::Tensor& to) -> std::string {
    try {
      codec.encode(from, to);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "no error";
  };
  using ::testing::HasSubstr;
  EXPECT_THROW(BlockCodec(2), UsageError);
  EXPECT_THAT(error_of(values.to(at::kDouble), encoded), HasSubstr("float32, bfloat16 or float16"));
  EXPECT_THAT(error_of(at::Tensor(), encoded), HasSubstr("undefined"));
  EXPECT_THAT(error_of(torch::randn({600, 2}).select(1, 0), encoded), HasSubstr("contiguous"));
  EXPECT_THAT(error_of(values, more), HasSubstr("uint8 [608]"));
  EXPECT_THAT(error_of(values, encoded.to(at::kChar)), HasSubstr("uint8 [608]"));
  EXPECT_THAT(error_of(values, more.narrow(0, 1, 608)), HasSubstr("multiple of 4 bytes"));
  EXPECT_THROW(codec.decode_sum({}, values), UsageError);
}

}  // namespace
}  // namespace ds
