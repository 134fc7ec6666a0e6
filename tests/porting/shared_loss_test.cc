// One loss for the models of several engines, and backward passes that begin at a tensor in place of a loss.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <tuple>
#include <vector>

#include "core/check.h"
#include "tests/porting/ported_run.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int kLossRanks = 2;
constexpr int kLossSteps = 5;

// Two models in a row, and a term of the first alone.
struct AutoEncoder {
  AutoEncoder() {
    fill(*encoder);
    fill(*decoder);
  }
  at::Tensor loss(const at::Tensor& x) {
    const at::Tensor code = encoder->forward(x);
    return (decoder->forward(code) - x).pow(2).mean() + 0.1 * code.pow(2).mean();
  }
  torch::nn::Sequential encoder{torch::nn::Linear(6, 8), torch::nn::Tanh(), torch::nn::Linear(8, 3)};
  torch::nn::Sequential decoder{torch::nn::Linear(3, 8), torch::nn::Tanh(), torch::nn::Linear(8, 6)};
};

torch::optim::AdamW adamw(const std::vector<at::Tensor>& parameters) {
  return torch::optim::AdamW(parameters, torch::optim::AdamWOptions(0.02).weight_decay(0.1));
}

State weights_of(AutoEncoder& nets) {
  State state = parameters_of(*nets.encoder);
  for (const auto& [name, tensor] : parameters_of(*nets.decoder)) state["decoder " + name] = tensor;
  return state;
}

State train_both_plainly(int accumulation) {
  AutoEncoder nets;
  auto encoder = adamw(nets.encoder->parameters());
  auto decoder = adamw(nets.decoder->parameters());
  for (int step = 0; step < kLossSteps; ++step) {
    encoder.zero_grad();
    decoder.zero_grad();
    for (int micro = step * accumulation; micro < (step + 1) * accumulation; ++micro) {
      for (int rank = 0; rank < kLossRanks; ++rank)
        (nets.loss(sample(micro, rank)) / (accumulation * kLossRanks)).backward();
    }
    encoder.step();
    decoder.step();
  }
  return weights_of(nets);
}

using LossCell = std::tuple<int, int>;  // stage, accumulation
class SharedLoss : public ::testing::TestWithParam<LossCell> {
 protected:
  static nlohmann::ordered_json config() {
    const auto [stage, accumulation] = GetParam();
    return small_config(stage, accumulation);
  }
};

TEST_P(SharedLoss, TrainsBothModelsAsTorch) {
  const int accumulation = std::get<1>(GetParam());
  const State expected = train_both_plainly(accumulation);
  test::run_ranks(kLossRanks, [&](comm::Communicator& communicator) {
    AutoEncoder nets;
    const auto encoder = start(nets.encoder.ptr(), config(), communicator).engine;
    const auto decoder = start(nets.decoder.ptr(), config(), communicator).engine;
    for (int micro = 0; micro < kLossSteps * accumulation; ++micro) {
      const at::Tensor loss = nets.loss(sample(micro, communicator.rank()));
      const at::Tensor averaged = backward(loss, {encoder, decoder});
      EXPECT_FLOAT_EQ(averaged.item<float>(), loss.item<float>() / static_cast<float>(accumulation));
      encoder->step();
      decoder->step();
    }
    EXPECT_EQ(encoder->global_steps(), kLossSteps);
    EXPECT_EQ(decoder->global_steps(), kLossSteps);
    State weights = copy_of(encoder->fp32_state_dict());
    for (const auto& [name, tensor] : decoder->fp32_state_dict()) weights["decoder " + name] = tensor;
    EXPECT_LT(largest_difference(weights, expected), 10 * kSameResult);
  });
}

// Passes of its own and shared ones add up, in any order.
TEST_P(SharedLoss, AddsToPassesOfOneEngineAlone) {
  const int accumulation = std::get<1>(GetParam());
  const auto own_loss = [](AutoEncoder& nets, const at::Tensor& x) { return nets.encoder->forward(x).sin().mean(); };
  AutoEncoder plain;
  auto encoder_optimizer = adamw(plain.encoder->parameters());
  auto decoder_optimizer = adamw(plain.decoder->parameters());
  for (int micro = 0; micro < accumulation; ++micro) {
    for (int rank = 0; rank < kLossRanks; ++rank) {
      ((own_loss(plain, sample(micro, rank)) + plain.loss(sample(micro, rank))) / (accumulation * kLossRanks))
          .backward();
      (own_loss(plain, sample(micro + 7, rank)) / (accumulation * kLossRanks)).backward();
    }
  }
  encoder_optimizer.step();
  decoder_optimizer.step();
  test::run_ranks(kLossRanks, [&](comm::Communicator& communicator) {
    AutoEncoder nets;
    const auto encoder = start(nets.encoder.ptr(), config(), communicator).engine;
    const auto decoder = start(nets.decoder.ptr(), config(), communicator).engine;
    for (int micro = 0; micro < accumulation; ++micro) {
      encoder->backward(own_loss(nets, sample(micro, communicator.rank())));
      backward(nets.loss(sample(micro, communicator.rank())), {encoder, decoder});
      encoder->backward(own_loss(nets, sample(micro + 7, communicator.rank())));
      decoder->step();
      encoder->step();
    }
    State weights = copy_of(encoder->fp32_state_dict());
    for (const auto& [name, tensor] : decoder->fp32_state_dict()) weights["decoder " + name] = tensor;
    EXPECT_LT(largest_difference(weights, weights_of(plain)), 10 * kSameResult);
  });
}

TEST_P(SharedLoss, WithoutTheOtherEngineItIsAnErrorOfThatOne) {
  test::run_ranks(kLossRanks, [&](comm::Communicator& communicator) {
    AutoEncoder nets;
    const auto encoder = start(nets.encoder.ptr(), config(), communicator).engine;
    const auto decoder = start(nets.decoder.ptr(), config(), communicator).engine;
    encoder->backward(nets.loss(sample(0, communicator.rank())));
    encoder->step();
    EXPECT_THAT([&] { decoder->step(); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("step() of the engine of torch::nn::SequentialImpl"),
                                                HasSubstr("engine::backward(loss, {one engine, the other})"))));
  });
}

TEST_P(SharedLoss, BeginsAtATensorWithItsGradient) {
  const auto [stage, accumulation] = GetParam();
  const auto gradient_of = [](const at::Tensor& x) { return x.narrow(1, 0, 3).cos(); };
  SmallNet plain;
  auto optimizer = adamw(plain->parameters());
  for (int micro = 0; micro < accumulation * 3; ++micro) {
    for (int rank = 0; rank < kLossRanks; ++rank) {
      const at::Tensor x = sample(micro, rank);
      plain->forward(x).backward(gradient_of(x) / (accumulation * kLossRanks));
    }
    if ((micro + 1) % accumulation != 0) continue;
    optimizer.step();
    optimizer.zero_grad();
  }
  test::run_ranks(kLossRanks, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), config(), communicator).engine;
    for (int micro = 0; micro < accumulation * 3; ++micro) {
      const at::Tensor x = sample(micro, communicator.rank());
      engine->backward(model->forward(x), gradient_of(x));
      engine->step();
    }
    EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), parameters_of(*plain)), 10 * kSameResult);
    const at::Tensor x = sample(0, communicator.rank());
    EXPECT_THAT([&] { engine->backward(model->forward(x), gradient_of(x).narrow(0, 0, 2)); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("expected a gradient of the shape of out"),
                                                HasSubstr("Float [4, 3]"), HasSubstr("Float [2, 3]"))));
    EXPECT_THAT([&] { engine->backward(model->forward(x)); },
                ThrowsMessage<UsageError>(HasSubstr("backward(out, gradient)")));
  });
}

class SharedReductions : public ::testing::TestWithParam<int> {};

// The gradients of a rank come in another order than those of the others, or not at all: which bucket of which engine
// is complete first is not the same. (At stage 3 ranks run the same operators.)
TEST_P(SharedReductions, RanksMayUseTheModelsDifferently) {
  test::run_ranks(kLossRanks, [&](comm::Communicator& communicator) {
    SmallNet first;
    SmallNet second;
    const auto one = start(first.ptr(), small_config(GetParam(), 1), communicator).engine;
    const auto other = start(second.ptr(), small_config(GetParam(), 1), communicator).engine;
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = sample(step, 0);
      at::Tensor loss;
      if (communicator.rank() == 0) {
        const at::Tensor before = first->loss(x);
        loss = before + second->loss(x);
      } else {
        const at::Tensor before = second->loss(x);
        loss = step < 2 ? before + first->loss(x) : before;
      }
      backward(loss, {one, other});
      one->step();
      other->step();
      // The last step has no gradient of the first model on rank 1.
      const double share = step < 2 ? 1.0 : 0.5;
      const double norm = other->get_global_grad_norm().value();
      EXPECT_NEAR(one->get_global_grad_norm().value(), share * norm, 1e-6 * norm) << step;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, SharedReductions, ::testing::Values(0, 1, 2), stage_name);

INSTANTIATE_TEST_SUITE_P(Stages, SharedLoss, ::testing::Combine(::testing::Values(0, 1, 2, 3), ::testing::Values(1, 2)),
                         [](const auto& cell) {
                           return "Stage" + std::to_string(std::get<0>(cell.param)) + "Accumulation" +
                                  std::to_string(std::get<1>(cell.param));
                         });

nlohmann::ordered_json with_fp16(nlohmann::ordered_json config, int power, double loss_scale = 0) {
  config["fp16"] = {{"enabled", true}, {"initial_scale_power", power}, {"loss_scale", loss_scale}, {"hysteresis", 1}};
  return config;
}

class ScaledPasses : public ::testing::TestWithParam<int> {};

// float16 models: loss scale in, and out again.
TEST_P(ScaledPasses, ATensorsGradientIsScaledAsALoss) {
  const auto norm_of = [](bool from_loss, int power) {
    double norm = 0;
    test::run_ranks(kLossRanks, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), with_fp16(small_config(GetParam(), 1), power), communicator).engine;
      const at::Tensor out = model->forward(sample(0, communicator.rank()).to(torch::kHalf));
      if (from_loss) {
        engine->backward(out.to(torch::kFloat).sum() / 4);
      } else {
        engine->backward(out, torch::full_like(out, 0.25));
      }
      engine->step();
      EXPECT_TRUE(engine->was_step_applied());
      if (communicator.rank() == 0) norm = engine->get_global_grad_norm().value();
    });
    return norm;
  };
  const double expected = norm_of(true, 8);
  EXPECT_GT(expected, 0.1);
  EXPECT_NEAR(norm_of(false, 8), expected, 1e-3 * expected);
  EXPECT_NEAR(norm_of(false, 10), expected, 1e-3 * expected);
}

TEST_P(ScaledPasses, EnginesOfOneLossHaveOneScale) {
  test::run_ranks(kLossRanks, [&](comm::Communicator& communicator) {
    SmallNet first;
    SmallNet second;
    const auto engine_of = [&](SmallNet& model, int accumulation, int power, double loss_scale = 0) {
      const auto config = with_fp16(small_config(GetParam(), accumulation), power, loss_scale);
      return start(model.ptr(), config, communicator).engine;
    };
    const auto loss = [&] {
      const at::Tensor x = sample(0, communicator.rank());
      return first->loss(x).to(torch::kFloat) + second->loss(x).to(torch::kFloat);
    };
    auto one = engine_of(first, 1, 4);
    auto other = engine_of(second, 1, 6);
    backward(loss(), {one, other});
    EXPECT_EQ(one->loss_scale(), 16);
    EXPECT_EQ(other->loss_scale(), 16);
    one->step();
    other->step();
    EXPECT_EQ(one->get_global_grad_norm(), other->get_global_grad_norm());
    other.reset();
    second = SmallNet();
    other = engine_of(second, 1, 0, /*loss_scale=*/64);
    EXPECT_THAT(
        [&] {
          backward(loss(), {one, other});
        },
        ThrowsMessage<UsageError>(AllOf(HasSubstr("expected one loss scale, found 64"), HasSubstr("16"))));
    other.reset();
    second = SmallNet();
    other = engine_of(second, 2, 4);
    EXPECT_THAT(
        [&] {
          backward(loss(), {one, other});
        },
        ThrowsMessage<UsageError>(HasSubstr("expected one gradient_accumulation_steps")));
    EXPECT_THAT([&] { backward(loss(), {one, one}); }, ThrowsMessage<UsageError>(HasSubstr("each engine once")));
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, ScaledPasses, ::testing::Values(0, 1, 2, 3), stage_name);

}  // namespace
}  // namespace ds::engine
