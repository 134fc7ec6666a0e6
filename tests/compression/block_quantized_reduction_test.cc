// 8-bit reductions against the same arithmetic on plain tensors.
#include "compression/block_quantized_reduction.h"

#include <gtest/gtest.h>

#include <limits>

#include "compression/bucket_parts.h"
#include "core/check.h"
#include "tests/compression/reduction_runs.h"

namespace ds::test {
namespace {

using compression::BlockQuantizedReduction;
using compression::ErrorMemory;
using compression::parts_of;

at::Tensor through_codec(const at::Tensor& values) {
  const BlockCodec codec(8);
  const at::Tensor encoded = torch::empty({codec.encoded_bytes(values.numel())}, at::kByte);
  const at::Tensor decoded = torch::empty({values.numel()});
  codec.encode(values.contiguous(), encoded);
  codec.decode(encoded, decoded);
  return decoded;
}

// What all ranks remember and what arrives, one step after another.
struct QuantizedReference {
  int world;
  bool scatter;
  std::vector<at::Tensor> errors;

  at::Tensor step(std::vector<at::Tensor> gradients, ReduceOp op) {
    const int64_t numel = gradients[0].numel();
    if (errors.empty()) errors.assign(static_cast<size_t>(world), torch::zeros({numel}));
    at::Tensor result = torch::empty({numel});
    for (auto& error : errors) error = error.clone();
    for (size_t rank = 0; rank < gradients.size(); ++rank) errors[rank] += gradients[rank];
    for (int owner = 0; owner < world; ++owner) {
      const auto [begin, length] = parts_of(numel, world)[static_cast<size_t>(owner)];
      if (length == 0) continue;
      at::Tensor sum = torch::zeros({length});
      for (const at::Tensor& error : errors) {
        const at::Tensor own = error.narrow(0, begin, length);
        const at::Tensor sent = through_codec(own);
        sum += sent;
        own.sub_(sent);
      }
      if (!scatter) {
        const at::Tensor sent = through_codec(sum);
        errors[static_cast<size_t>(owner)].narrow(0, begin, length).add_(sum - sent);
        sum = sent;
      }
      result.narrow(0, begin, length).copy_(op == ReduceOp::kAvg ? sum / world : sum);
    }
    return result.to(gradients[0].scalar_type());
  }
};

class BlockQuantized : public ::testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(BlockQuantized, ArrivesAsThePlainArithmeticSays) {
  const auto [world, scatter] = GetParam();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const int64_t numel : {int64_t{12}, int64_t{516}, int64_t{5004}}) {
      QuantizedReference reference{world, scatter, {}};
      std::vector<at::Tensor> expected;
      for (int64_t step = 0; step < 3; ++step) {
        std::vector<at::Tensor> gradients;
        for (int rank = 0; rank < world; ++rank) gradients.push_back(gradient_of(numel, rank, step, dtype));
        expected.push_back(reference.step(gradients, step == 1 ? ReduceOp::kAvg : ReduceOp::kSum));
      }
      run_ranks(world, [&, world = world, scatter = scatter](Communicator& communicator) {
        BlockQuantizedReduction reduction(exchange_groups(lent(communicator)), ErrorMemory({numel}, at::kCPU, true));
        for (int64_t step = 0; step < 3; ++step) {
          const at::Tensor gradient = gradient_of(numel, communicator.rank(), step, dtype);
          const at::Tensor found =
              reduce(reduction, communicator, gradient, scatter, step == 1 ? ReduceOp::kAvg : ReduceOp::kSum);
          EXPECT_TRUE(torch::equal(found, world == 1 ? gradient : expected[static_cast<size_t>(step)]))
              << dtype << " " << numel << " step " << step;
        }
      });
    }
  }
}

TEST_P(BlockQuantized, WithoutFeedbackNothingIsRemembered) {
  const auto [world, scatter] = GetParam();
  constexpr int64_t kNumel = 1200;
  run_ranks(world, [&, scatter = scatter](Communicator& communicator) {
    BlockQuantizedReduction reduction(exchange_groups(lent(communicator)), ErrorMemory({kNumel}, at::kCPU, false));
    EXPECT_TRUE(reduction.memory().empty());
    const at::Tensor gradient = gradient_of(kNumel, communicator.rank(), 0);
    const at::Tensor first = reduce(reduction, communicator, gradient, scatter);
    EXPECT_TRUE(torch::equal(reduce(reduction, communicator, gradient, scatter), first));
    EXPECT_TRUE(first.to(torch::kDouble)
                    .allclose(summed_gradients(kNumel, communicator.size(), 0), 0, 0.02 * communicator.size() * 2.5));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, BlockQuantized, ::testing::Combine(::testing::Values(1, 2, 3, 4), ::testing::Bool()));

TEST(BlockQuantizedReduction, PartsMayBeShortOrEmpty) {
  for (const int64_t numel : {1, 2, 5, 1025}) {
    run_ranks(4, [numel](Communicator& communicator) {
      BlockQuantizedReduction reduction(exchange_groups(lent(communicator)), ErrorMemory({numel}, at::kCPU, true));
      const at::Tensor found = reduce(reduction, communicator, gradient_of(numel, communicator.rank(), 0), false);
      EXPECT_TRUE(found.to(torch::kDouble).allclose(summed_gradients(numel, 4, 0), 0, 0.2)) << numel;
      EXPECT_TRUE(same_on_all_ranks(found, communicator));
    });
  }
}

TEST(BlockQuantizedReduction, SeveralBucketsMayBeUnderWayAndHurryAhead) {
  constexpr int64_t kNumel = 2000;
  run_ranks(3, [](Communicator& communicator) {
    BlockQuantizedReduction reduction(exchange_groups(lent(communicator)),
                                      ErrorMemory({kNumel, kNumel, kNumel}, at::kCPU, true));
    std::vector<at::Tensor> flat;
    std::vector<comm::Work> works;
    for (size_t b = 0; b < 3; ++b) {
      flat.push_back(gradient_of(kNumel, communicator.rank(), static_cast<int64_t>(b)));
      works.push_back(reduction.start(b, flat[b], flat[b], ReduceOp::kSum, "bucket"));
      // One rank begins second exchanges as soon as it can, others when they wait.
      if (communicator.rank() == 0) works.front().is_ready();
    }
    for (size_t b = 0; b < 3; ++b) {
      works[b].wait();
      EXPECT_TRUE(works[b].is_completed());
      EXPECT_TRUE(flat[b].to(torch::kDouble).allclose(summed_gradients(kNumel, 3, static_cast<int64_t>(b)), 0, 0.2));
    }
  });
}

TEST(BlockQuantizedReduction, SendsAQuarterOfTheBytes) {
  constexpr int64_t kNumel = 1 << 16;
  run_ranks(4, [](Communicator& communicator) {
    const auto groups = exchange_groups(lent(communicator));
    BlockQuantizedReduction reduction(groups, ErrorMemory({kNumel}, at::kCPU, true));
    const auto sent = [&] {
      return groups.first->counters().total_bytes_sent() + groups.second->counters().total_bytes_sent();
    };
    at::Tensor gradient = gradient_of(kNumel, communicator.rank(), 0);
    const int64_t before = sent();
    reduction.start(0, gradient, gradient, ReduceOp::kAvg, "gradients").wait();
    const int64_t compressed = sent() - before;
    communicator.all_reduce(gradient).wait();
    const int64_t dense = sent() - before - compressed;
    EXPECT_NEAR(static_cast<double>(compressed) / static_cast<double>(dense), 0.252, 0.001);
  });
}

TEST(BlockQuantizedReduction, NanArrivesAndIsForgotten) {
  constexpr int64_t kNumel = 4096;
  run_ranks(2, [](Communicator& communicator) {
    for (const bool scatter : {false, true}) {
      BlockQuantizedReduction reduction(exchange_groups(lent(communicator)), ErrorMemory({kNumel}, at::kCPU, true));
      at::Tensor gradient = gradient_of(kNumel, communicator.rank(), 0);
      if (communicator.rank() == 1) gradient[3000] = std::numeric_limits<float>::infinity();
      const at::Tensor found = reduce(reduction, communicator, gradient, scatter);
      EXPECT_TRUE(found[3000].isnan().item<bool>());
      EXPECT_FALSE(found[0].isnan().item<bool>());
      EXPECT_TRUE(torch::isfinite(error_of(reduction)).all().item<bool>());
      const at::Tensor next = reduce(reduction, communicator, gradient_of(kNumel, communicator.rank(), 1), scatter);
      EXPECT_TRUE(torch::isfinite(next).all().item<bool>());
    }
  });
}

TEST(BlockQuantizedReduction, RefusesWhatDoesNotFit) {
  run_ranks(2, [](Communicator& communicator) {
    BlockQuantizedReduction reduction(exchange_groups(lent(communicator)), ErrorMemory({8}, at::kCPU, true));
    const auto start = [&](const at::Tensor& output, const at::Tensor& gradient, ReduceOp op) {
      reduction.start(0, output, gradient, op, "gradients");
    };
    const at::Tensor flat = torch::zeros({8});
    EXPECT_THROW(start(flat.narrow(0, 0, 3), flat, ReduceOp::kSum), UsageError);
    EXPECT_THROW(start(flat, flat, ReduceOp::kMax), UsageError);
    const at::Tensor wide = torch::zeros({8}, torch::kDouble);
    EXPECT_THROW(start(wide, wide, ReduceOp::kSum), UsageError);
    const at::Tensor longer = torch::zeros({16});
    EXPECT_THROW(start(longer, longer, ReduceOp::kSum), UsageError) << "not the bucket it remembers";
  });
}

}  // namespace
}  // namespace ds::test
