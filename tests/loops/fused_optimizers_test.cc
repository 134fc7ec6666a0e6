// FusedAdam and FusedAdamW beside torch's classes: numbers, states, and where they are used.
#include "dsengine/fused_optimizers.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <sstream>
#include <vector>

#include "dsengine/fully_shard.h"
#include "tests/loops/block_net.h"
#include "tests/support/thread_ranks.h"

namespace ds {
namespace {

constexpr double kFusedTolerance = 5e-6;

template <class Optimizer>
test::MakeOptimizer maker(const typename Optimizer::Options& options) {
  return [options](const test::Tensors& p) {
    return std::make_unique<typename Optimizer::Class>(p, typename Optimizer::Options(options));
  };
}

struct PlainAdam {
  using Class = torch::optim::Adam;
  using Options = torch::optim::AdamOptions;
};
struct OurAdam {
  using Class = FusedAdam;
  using Options = torch::optim::AdamOptions;
};
struct PlainAdamW {
  using Class = torch::optim::AdamW;
  using Options = torch::optim::AdamWOptions;
};
struct OurAdamW {
  using Class = FusedAdamW;
  using Options = torch::optim::AdamWOptions;
};

void expect_same_training(const test::MakeOptimizer& plain, const test::MakeOptimizer& fused) {
  const test::NamedValues expected = test::train_plain(2, 50, plain);
  EXPECT_LT(test::largest_difference(test::train_plain(2, 50, fused), expected), kFusedTolerance);
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto sharded = fully_shard(model, {.process_group = test::borrowed(communicator)});
    const auto optimizer = fused(sharded->parameters());
    test::train(model, *optimizer, communicator.rank(), 50);
    EXPECT_LT(test::largest_difference(sharded->full_state_dict(), expected), kFusedTolerance);
  });
}

TEST(FusedOptimizers, TrainAsTorchsDoOnOneRankAndOnSlices) {
  for (const bool amsgrad : {false, true}) {
    const auto adam = torch::optim::AdamOptions(2e-3).amsgrad(amsgrad).weight_decay(0.02);
    expect_same_training(maker<PlainAdam>(adam), maker<OurAdam>(adam));
    const auto adamw = torch::optim::AdamWOptions(2e-3).amsgrad(amsgrad).weight_decay(0.1);
    expect_same_training(maker<PlainAdamW>(adamw), maker<OurAdamW>(adamw));
  }
}

// Trains, saves, and goes on with the other class.
template <class First, class Second>
std::vector<at::Tensor> trained_in_turn(const torch::optim::AdamWOptions& options) {
  test::BlockNet model;
  std::stringstream saved;
  const auto step = [&](torch::optim::Optimizer& optimizer, int from) {
    for (int s = from; s < from + 5; ++s) {
      optimizer.zero_grad();
      model->loss(test::batch_of(s, 0)).backward();
      optimizer.step();
    }
  };
  First first(model->parameters(), options);
  step(first, 0);
  torch::save(first, saved);
  Second second(model->parameters(), options);
  torch::load(second, saved);
  step(second, 5);
  return model->parameters();
}

TEST(FusedOptimizers, GoOnWithWhatTorchsHaveSavedAndTheOtherWayRound) {
  const torch::optim::AdamWOptions options(2e-3);
  const auto expected = trained_in_turn<torch::optim::AdamW, torch::optim::AdamW>(options);
  for (const auto& found : {trained_in_turn<torch::optim::AdamW, FusedAdamW>(options),
                            trained_in_turn<FusedAdamW, torch::optim::AdamW>(options)}) {
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_LE((found[i] - expected[i]).abs().max().item<double>(), kFusedTolerance) << i;
    }
  }
}

TEST(FusedOptimizers, WhatHasNoGradientStaysAndAClosureGivesTheLoss) {
  const at::Tensor used = torch::ones({3}).requires_grad_();
  const at::Tensor unused = torch::ones({3}).requires_grad_();
  FusedAdamW optimizer({used, unused}, torch::optim::AdamWOptions(0.1));
  const at::Tensor loss = optimizer.step([&] {
    const at::Tensor value = used.pow(2).sum();
    value.backward();
    return value;
  });
  EXPECT_EQ(loss.item<double>(), 3);
  EXPECT_LT(used.max().item<double>(), 1);
  EXPECT_TRUE(unused.equal(torch::ones({3})));
  EXPECT_EQ(optimizer.state().size(), 1U);
}

}  // namespace
}  // namespace ds
