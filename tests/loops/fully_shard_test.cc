// Loops over fully_shard against plain torch on the joined batches.
#include "dsengine/fully_shard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "core/check.h"
#include "tests/loops/block_net.h"
#include "tests/support/thread_ranks.h"

namespace ds {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr double kTolerance = 5e-6;
constexpr double kHalfTolerance = 5e-3;
constexpr int kSteps = 50;

// Every block a unit, then the model, as FSDP2's tutorial does.
std::shared_ptr<FullySharded> shard_blocks(test::BlockNet& model, const FullyShardOptions& options) {
  for (test::Block& block : model->blocks) fully_shard(block, options);
  return fully_shard(model, options);
}

void train(FullySharded& sharded, test::BlockNet& model, torch::optim::Optimizer& optimizer, int rank, int steps) {
  test::train(model, optimizer, rank, steps);
  EXPECT_EQ(sharded.held_bytes().gathered, 0);
}

// --- numbers
// -----------------------------------------------------------------------------------------------------------

enum class Sharding { kReshard, kStay, kHybrid };

struct NumbersCase {
  Sharding sharding;
  size_t optimizer;
};

class FullyShardNumbers : public ::testing::TestWithParam<NumbersCase> {};

std::vector<NumbersCase> numbers_cases() {
  std::vector<NumbersCase> cases;
  for (const Sharding sharding : {Sharding::kReshard, Sharding::kStay, Sharding::kHybrid}) {
    for (size_t o = 0; o < test::optimizers().size(); ++o) cases.push_back({sharding, o});
  }
  return cases;
}

std::string name_of(const ::testing::TestParamInfo<NumbersCase>& cell) {
  const std::vector<std::string> names = {"Reshard", "Stay", "Hybrid"};
  return names[static_cast<size_t>(cell.param.sharding)] + test::optimizers()[cell.param.optimizer].first;
}

INSTANTIATE_TEST_SUITE_P(Grid, FullyShardNumbers, ::testing::ValuesIn(numbers_cases()), name_of);

TEST_P(FullyShardNumbers, AgreeWithTorch) {
  const auto [sharding, number] = GetParam();
  const test::MakeOptimizer make = test::optimizers()[number].second;
  const int ranks = sharding == Sharding::kHybrid ? 4 : 2;
  const test::NamedValues expected = test::train_plain(ranks, kSteps, make);
  test::run_ranks(ranks, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    FullyShardOptions options;
    if (sharding == Sharding::kHybrid) {
      options.mesh = comm::init_device_mesh(test::borrowed(communicator), {2, 2}, {"replicate", "shard"});
    } else {
      options.process_group = test::borrowed(communicator);
      options.reshard_after_forward = sharding == Sharding::kReshard;
    }
    const auto sharded = shard_blocks(model, options);
    const auto optimizer = make(sharded->parameters());
    train(*sharded, model, *optimizer, communicator.rank(), kSteps);
    EXPECT_LT(test::largest_difference(sharded->full_state_dict(), expected), kTolerance);
  });
}

// One process: the model in bfloat16, float32 masters of its weights.
test::NamedValues train_in_bfloat16(int ranks, const test::MakeOptimizer& make) {
  test::BlockNet masters;
  test::BlockNet model;
  model->to(torch::kBFloat16);
  const auto optimizer = make(masters->parameters());
  for (int step = 0; step < kSteps; ++step) {
    const at::NoGradGuard no_grad;
    for (size_t p = 0; p < masters->parameters().size(); ++p) model->parameters()[p].copy_(masters->parameters()[p]);
    at::AutoGradMode grad(true);
    model->loss(test::joined_batch(step, ranks)).backward();
    for (size_t p = 0; p < masters->parameters().size(); ++p) {
      at::Tensor& gradient = model->parameters()[p].mutable_grad();
      masters->parameters()[p].mutable_grad() = gradient.to(torch::kFloat);
      gradient.reset();
    }
    optimizer->step();
  }
  return test::named_values(*masters);
}

TEST(FullyShard, Bfloat16AgreesWithTorch) {
  const auto all = test::optimizers();
  for (const size_t number : {0, 2}) {
    const test::NamedValues expected = train_in_bfloat16(2, all[number].second);
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      test::BlockNet model;
      const auto sharded =
          shard_blocks(model, {.process_group = test::borrowed(communicator),
                               .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
      const auto optimizer = all[number].second(sharded->parameters());
      train(*sharded, model, *optimizer, communicator.rank(), kSteps);
      EXPECT_EQ(sharded->parameters().front().scalar_type(), at::kFloat);
      EXPECT_LT(test::largest_difference(sharded->full_state_dict(), expected), kHalfTolerance) << all[number].first;
    });
  }
}

TEST(FullyShard, AccumulatesWithAndWithoutSynchronisation) {
  const test::MakeOptimizer make = test::optimizers()[0].second;
  const test::NamedValues expected = test::train_plain(2, 10, make, /*micro_batches=*/3);
  for (const bool synchronises : {true, false}) {
    for (const bool hybrid : {false, true}) {
      test::run_ranks(2, [&](comm::Communicator& communicator) {
        test::BlockNet model;
        FullyShardOptions options;
        if (hybrid) {
          options.mesh = comm::init_device_mesh(test::borrowed(communicator), {2, 1}, {"replicate", "shard"});
        } else {
          options.process_group = test::borrowed(communicator);
        }
        const auto sharded = shard_blocks(model, options);
        const auto optimizer = make(sharded->parameters());
        for (int64_t micro = 0; micro < 30; ++micro) {
          const bool last = micro % 3 == 2;
          sharded->set_requires_gradient_sync(synchronises || last);
          sharded->set_reshard_after_backward(last);
          model->loss(test::batch_of(micro, communicator.rank())).backward();
          EXPECT_EQ(sharded->held_bytes().gathered > 0, !last && !hybrid);  // of one rank nothing is gathered
          if (!last) continue;
          optimizer->step();
          optimizer->zero_grad(/*set_to_none=*/micro % 2 == 0);
        }
        EXPECT_LT(test::largest_difference(sharded->full_state_dict(), expected), kTolerance);
      });
    }
  }
}

TEST(FullyShard, ClipsByTheNormOfTheWholeModel) {
  for (const double p : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
    test::BlockNet plain;
    plain->loss(test::joined_batch(0, 2)).backward();
    const double expected = torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.01, p);
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      test::BlockNet model;
      const auto sharded = shard_blocks(model, {.process_group = test::borrowed(communicator)});
      model->loss(test::batch_of(0, communicator.rank())).backward();
      EXPECT_NEAR(sharded->clip_grad_norm_(0.01, p), expected, 1e-5 * expected);
      EXPECT_NEAR(sharded->clip_grad_norm_(1e9, p), 0.01, 1e-6);
    });
  }
}

TEST(FullyShard, AStepIsSeenByWhatWasGatheredBefore) {
  const test::MakeOptimizer make = test::optimizers()[0].second;
  const test::NamedValues expected = test::train_plain(2, 5, make);
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto sharded =
        shard_blocks(model, {.process_group = test::borrowed(communicator), .reshard_after_forward = false});
    const auto optimizer = make(sharded->parameters());
    for (int step = 0; step < 5; ++step) {
      model->loss(test::batch_of(step, communicator.rank())).backward();
      const at::NoGradGuard no_grad;
      model->loss(test::batch_of(step, communicator.rank()));
      EXPECT_GT(sharded->held_bytes().gathered, 0);
      if (step % 2 == 0) sharded->unshard();
      optimizer->step();
      optimizer->zero_grad();
      at::AutoGradMode grad(true);
    }
    EXPECT_LT(test::largest_difference(sharded->full_state_dict(), expected), kTolerance);
  });
}

// --- memory
// ------------------------------------------------------------------------------------------------------------

int64_t elements(const torch::nn::Module& module) {
  int64_t count = 0;
  for (const at::Tensor& parameter : module.parameters()) count += parameter.numel();
  return count;
}

TEST(FullyShard, BetweenStepsARankHoldsItsSlices) {
  for (const bool half : {false, true}) {
    test::run_ranks(4, [&](comm::Communicator& communicator) {
      test::BlockNet model;
      const int64_t whole = elements(*model) * 4;
      FullyShardOptions options = {.process_group = test::borrowed(communicator)};
      if (half) options.mp_policy.param_dtype = at::kBFloat16;
      const auto sharded = shard_blocks(model, options);
      torch::optim::SGD optimizer(sharded->parameters(), 0.1);
      const int64_t padding = 5 * 16 * 4 * 8;  // at most, of five buckets
      for (int step = 0; step < 3; ++step) {
        const at::Tensor loss = model->loss(test::batch_of(step, communicator.rank()));
        EXPECT_GT(sharded->held_bytes().gathered, 0);
        loss.backward();
        const zero::HeldBytes held = sharded->held_bytes();
        EXPECT_EQ(held.gathered, 0);
        EXPECT_LE(held.parameters + held.master, whole / 4 + padding);
        EXPECT_LE(held.gradients, whole / 4 + padding);
        optimizer.step();
        optimizer.zero_grad();
        EXPECT_EQ(sharded->held_bytes().gradients, 0);
      }
    });
  }
}

TEST(FullyShard, ParametersStayOrGoAfterForward) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const auto gathered_after_forward = [&](bool reshards) {
      test::BlockNet model;
      const auto sharded =
          shard_blocks(model, {.process_group = test::borrowed(communicator), .reshard_after_forward = reshards});
      model->loss(test::batch_of(0, 0)).backward();
      const at::Tensor loss = model->loss(test::batch_of(0, 0));
      const int64_t bytes = sharded->held_bytes().gathered;
      loss.backward();
      EXPECT_EQ(sharded->held_bytes().gathered, 0);
      return bytes;
    };
    const int64_t all = gathered_after_forward(false);
    EXPECT_GE(all, elements(*test::BlockNet()) * 4);
    EXPECT_LT(gathered_after_forward(true), all);  // one block has gone, the next ones are ahead of backward
  });
}

}  // namespace
}  // namespace ds
