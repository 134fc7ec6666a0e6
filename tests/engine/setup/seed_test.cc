#include "engine/setup/seed.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace ds::engine {
namespace {

TEST(Seed, SameSeedAndRankSameNumbersOtherRanksOthers) {
  const auto draw = [](uint64_t seed, int rank) {
    seed_everything(seed, rank);
    return torch::rand({8});
  };
  EXPECT_TRUE(torch::equal(draw(3, 0), draw(3, 0)));
  EXPECT_TRUE(torch::equal(draw(3, 2), draw(3, 2)));
  EXPECT_FALSE(torch::equal(draw(3, 0), draw(3, 1)));
  EXPECT_FALSE(torch::equal(draw(3, 0), draw(4, 0)));
}

TEST(Seed, DeterministicModeRefusesOperationsWithoutADeterministicAlgorithm) {
  // One that torch lists as non-deterministic on every device.
  const auto run = [] {
    const at::Tensor target = torch::zeros({4});
    return target.put_(torch::tensor({1, 1}), torch::ones({2}), false);
  };
  EXPECT_NO_THROW(run());
  set_deterministic(true);
  EXPECT_TRUE(at::globalContext().deterministicAlgorithms());
  EXPECT_FALSE(at::globalContext().benchmarkCuDNN());
  EXPECT_THROW(run(), c10::Error);
  set_deterministic(true, true);
  EXPECT_NO_THROW(run());
  set_deterministic(false);
  EXPECT_FALSE(at::globalContext().deterministicAlgorithms());
  EXPECT_NO_THROW(run());
}

TEST(Seed, ThePrecisionOfProductsIsThatOfTheProcess) {
  const at::Float32MatmulPrecision before = at::globalContext().float32MatmulPrecision();
  set_float32_matmul_precision("high");
  EXPECT_EQ(at::globalContext().float32MatmulPrecision(), at::Float32MatmulPrecision::HIGH);
  EXPECT_TRUE(at::globalContext().allowTF32CuDNN());
  set_float32_matmul_precision("highest");
  EXPECT_EQ(at::globalContext().float32MatmulPrecision(), at::Float32MatmulPrecision::HIGHEST);
  EXPECT_FALSE(at::globalContext().allowTF32CuDNN());
  ASSERT_EQ(before, at::Float32MatmulPrecision::HIGHEST) << "what it is again";
}

TEST(Seed, TheBackendsOfAttentionAreThoseOfTheList) {
  at::Context& context = at::globalContext();
  order_sdpa_backends({"math", "flash"});
  EXPECT_EQ(context.sDPPriorityOrder()[0], at::SDPBackend::math);
  EXPECT_EQ(context.sDPPriorityOrder()[1], at::SDPBackend::flash_attention);
  EXPECT_TRUE(context.userEnabledMathSDP());
  EXPECT_TRUE(context.userEnabledFlashSDP());
  EXPECT_FALSE(context.userEnabledCuDNNSDP());
  EXPECT_FALSE(context.userEnabledMemEfficientSDP());
  set_sdpa_backends({"cudnn"}, c10::kCPU);  // the settings choose kernels of the CPU, too: they stay
  EXPECT_TRUE(context.userEnabledMathSDP());
  EXPECT_TRUE(context.userEnabledFlashSDP());
  order_sdpa_backends({"cudnn", "flash", "efficient", "math"});
  EXPECT_EQ(context.sDPPriorityOrder()[0], at::SDPBackend::cudnn_attention);
  EXPECT_EQ(context.sDPPriorityOrder()[3], at::SDPBackend::math);
  EXPECT_TRUE(context.userEnabledCuDNNSDP());
}

}  // namespace
}  // namespace ds::engine
