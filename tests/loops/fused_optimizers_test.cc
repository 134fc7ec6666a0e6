// FusedAdam and FusedAdamW beside torch's classes: numbers, states, and where they are used.
#include "dsengine/fused_optimizers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <sstream>
#include <type_traits>
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

StateDict before_training() { return test::state_values(*test::BlockNet()); }

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

// Column-major, with row-major gradients, and moments as torch::load() brings them.
TEST(FusedOptimizers, ParametersGradientsAndMomentsOfOtherStridesTrainAsTorchs) {
  const auto trained = [](auto* kind) {
    using Optimizer = std::remove_pointer_t<decltype(kind)>;
    const at::Tensor parameter = torch::linspace(-1, 1, 12).view({3, 4}).t().detach().requires_grad_();
    EXPECT_FALSE(parameter.is_contiguous());
    auto optimizer = std::make_unique<Optimizer>(test::Tensors{parameter}, torch::optim::AdamWOptions(0.05));
    for (int step = 0; step < 6; ++step) {
      parameter.mutable_grad() = torch::sin(torch::arange(12, torch::kFloat) * (step + 1.0)).view({4, 3});
      optimizer->step();
      if (step != 2) continue;
      std::stringstream saved;
      torch::save(*optimizer, saved);
      optimizer = std::make_unique<Optimizer>(test::Tensors{parameter}, torch::optim::AdamWOptions(0.05));
      torch::load(*optimizer, saved);
      for (const auto& [key, state] : optimizer->state()) {
        auto& own = static_cast<torch::optim::AdamWParamState&>(*state);
        own.exp_avg(own.exp_avg().contiguous());
        own.exp_avg_sq(own.exp_avg_sq().contiguous());
      }
    }
    return parameter.detach();
  };
  const at::Tensor expected = trained(static_cast<torch::optim::AdamW*>(nullptr));
  const at::Tensor found = trained(static_cast<FusedAdamW*>(nullptr));
  EXPECT_LE((found - expected).abs().max().item<double>(), kFusedTolerance);
}

TEST(FusedOptimizers, AParameterWithGapsInMemoryIsRefused) {
  const at::Tensor parameter = torch::ones({4, 6}).narrow(1, 0, 3).detach().requires_grad_();
  parameter.mutable_grad() = torch::ones({4, 3});
  FusedAdam optimizer({parameter}, torch::optim::AdamOptions(0.1));
  EXPECT_THAT([&] { optimizer.step(); }, ::testing::ThrowsMessage<c10::Error>(::testing::HasSubstr("without gaps")));
}

// Of three ranks some have nothing of a bias: they see the step too, and gather what the others have changed.
TEST(FusedOptimizers, StepsEndWhatStaysWholeAfterBackwardOnEveryRank) {
  const auto options = torch::optim::AdamWOptions(2e-3);
  const test::NamedValues expected = test::train_plain(3, 6, maker<PlainAdamW>(options));
  test::run_ranks(3, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    fully_shard(model->in, {.process_group = test::borrowed(communicator)});
    for (test::Block& block : model->blocks) {
      for (const auto& layer : block->children()) fully_shard(layer, {.process_group = test::borrowed(communicator)});
    }
    const auto sharded = fully_shard(model, {.process_group = test::borrowed(communicator)});
    sharded->set_reshard_after_backward(false);
    const auto parameters = sharded->parameters();
    for (const bool one_by_one : {false, true}) {
      std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers;
      if (one_by_one) {
        for (const at::Tensor& one : parameters) {
          optimizers.push_back(maker<OurAdamW>(options)({one}));
        }
        sharded->load_full_state_dict(before_training());
      } else {
        optimizers.push_back(maker<OurAdamW>(options)(parameters));
      }
      for (int step = 0; step < 6; ++step) {
        model->loss(test::batch_of(step, communicator.rank())).backward();
        for (const auto& optimizer : optimizers) {
          optimizer->step();
          optimizer->zero_grad();
        }
      }
      EXPECT_LT(test::largest_difference(sharded->full_state_dict(), expected), kFusedTolerance) << one_by_one;
    }
  });
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
