// Programs with several models and engines: GANs as tutorials write them, models that come and go.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "core/check.h"
#include "tests/porting/ported_run.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int kRanks = 2;

struct Gan {
  Gan() {
    fill(*generator);
    fill(*critic);
  }
  torch::nn::Sequential generator{torch::nn::Linear(5, 16), torch::nn::Tanh(), torch::nn::Linear(16, 6)};
  torch::nn::Sequential critic{torch::nn::Linear(6, 16), torch::nn::LeakyReLU(), torch::nn::Linear(16, 1)};
};

at::Tensor noise(int step, int rank) { return sample(step + 100, rank).narrow(1, 0, 5).contiguous(); }

at::Tensor bce(const at::Tensor& logits, double target) {
  return torch::nn::functional::binary_cross_entropy_with_logits(logits, torch::full_like(logits, target));
}

using EngineBackward = std::function<void(const at::Tensor&)>;
using Call = std::function<void()>;

// One step of the standard loop, as in PyTorch's DCGAN.
struct Calls {
  Call zero_critic;
  EngineBackward critic_backward;
  Call critic_step;
  Call zero_generator;
  EngineBackward generator_backward;
  Call generator_step;
};

std::pair<at::Tensor, at::Tensor> gan_step(Gan& gan, const at::Tensor& real, const at::Tensor& z, const Calls& calls) {
  calls.zero_critic();
  const at::Tensor fake = gan.generator->forward(z);
  const at::Tensor critic_loss = bce(gan.critic->forward(real), 1) + bce(gan.critic->forward(fake.detach()), 0);
  calls.critic_backward(critic_loss);
  calls.critic_step();
  calls.zero_generator();
  const at::Tensor generator_loss = bce(gan.critic->forward(fake), 1);
  calls.generator_backward(generator_loss);
  calls.generator_step();
  return {critic_loss.detach(), generator_loss.detach()};
}

constexpr int kSteps = 6;

std::vector<double> train_plainly() {
  Gan gan;
  torch::optim::AdamW critic(gan.critic->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  torch::optim::AdamW generator(gan.generator->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    at::Tensor real[kRanks];
    at::Tensor fake[kRanks];
    double critic_loss = 0;
    critic.zero_grad();
    for (int rank = 0; rank < kRanks; ++rank) {
      fake[rank] = gan.generator->forward(noise(step, rank));
      const at::Tensor loss =
          bce(gan.critic->forward(sample(step, rank)), 1) + bce(gan.critic->forward(fake[rank].detach()), 0);
      (loss / kRanks).backward();
      critic_loss += loss.item<double>() / kRanks;
    }
    critic.step();
    generator.zero_grad();
    double generator_loss = 0;
    for (int rank = 0; rank < kRanks; ++rank) {
      const at::Tensor loss = bce(gan.critic->forward(fake[rank]), 1);
      (loss / kRanks).backward();
      generator_loss += loss.item<double>() / kRanks;
    }
    generator.step();
    losses.push_back(critic_loss);
    losses.push_back(generator_loss);
  }
  return losses;
}

enum class Drops { kByEngine, kByModule, kByFreezing };

class SeveralEngines : public ::testing::TestWithParam<int> {};

TEST_P(SeveralEngines, TheStandardLoopOfAGanIsThatOfTorch) {
  const std::vector<double> expected = train_plainly();
  for (const Drops drops : {Drops::kByEngine, Drops::kByModule, Drops::kByFreezing}) {
    test::run_ranks(kRanks, [&](comm::Communicator& communicator) {
      Gan gan;
      const auto generator = start(gan.generator.ptr(), small_config(GetParam(), 1), communicator).engine;
      const auto critic = start(gan.critic.ptr(), small_config(GetParam(), 1), communicator).engine;
      std::unique_ptr<FrozenScope> frozen;
      const Calls calls = {.zero_critic =
                               [&] {
                                 if (drops == Drops::kByEngine) critic->zero_grad();
                                 if (drops == Drops::kByModule) gan.critic->zero_grad();
                               },
                           .critic_backward = [&](const at::Tensor& loss) { critic->backward(loss); },
                           .critic_step = [&] { critic->step(); },
                           .zero_generator =
                               [&] {
                                 generator->zero_grad();
                                 if (drops == Drops::kByFreezing) {
                                   frozen = std::unique_ptr<FrozenScope>(new FrozenScope(gan.critic->parameters()));
                                 }
                               },
                           .generator_backward = [&](const at::Tensor& loss) { generator->backward(loss); },
                           .generator_step =
                               [&] {
                                 frozen.reset();
                                 generator->step();
                               }};
      for (int step = 0; step < kSteps; ++step) {
        const auto [critic_loss, generator_loss] =
            gan_step(gan, sample(step, communicator.rank()), noise(step, communicator.rank()), calls);
        const size_t at = 2 * static_cast<size_t>(step);
        EXPECT_NEAR(mean_over(communicator, critic_loss.item<double>()), expected[at], kSameResult) << step;
        EXPECT_NEAR(mean_over(communicator, generator_loss.item<double>()), expected[at + 1], kSameResult) << step;
      }
    });
  }
}

TEST_P(SeveralEngines, GradientsOfAnotherEngineThatAreNotDroppedAreAnError) {
  test::run_ranks(kRanks, [&](comm::Communicator& communicator) {
    Gan gan;
    const auto generator = start(gan.generator.ptr(), small_config(GetParam(), 1), communicator).engine;
    const auto critic = start(gan.critic.ptr(), small_config(GetParam(), 1), communicator).engine;
    const at::Tensor real = sample(0, communicator.rank());
    const auto generator_step = [&] {
      generator->backward(bce(gan.critic->forward(gan.generator->forward(noise(0, communicator.rank()))), 1));
    };
    const auto critic_loss = [&] { return bce(gan.critic->forward(real), 1); };
    const auto is_named =
        AllOf(HasSubstr("the engine of torch::nn::SequentialImpl"), HasSubstr("backward() of another engine"),
              HasSubstr("zero_grad()"), HasSubstr("frozen_scope"));
    generator_step();
    generator->step();
    EXPECT_THAT([&] { critic->backward(critic_loss()); }, ThrowsMessage<UsageError>(is_named));
    critic->zero_grad();
    critic->backward(critic_loss());
    generator_step();
    generator->step();
    EXPECT_THAT([&] { critic->step(); }, ThrowsMessage<UsageError>(is_named));
    critic->zero_grad();
    critic->backward(critic_loss());
    critic->step();
  });
}

// What the critic has accumulated is not touched by the generator's pass, and comes back after it.
TEST_P(SeveralEngines, AnAccumulationGoesOnAfterAPassOfAnotherEngine) {
  double expected = 0;
  for (const bool between : {false, true}) {
    test::run_ranks(kRanks, [&](comm::Communicator& communicator) {
      Gan gan;
      const auto generator = start(gan.generator.ptr(), small_config(GetParam(), 1), communicator).engine;
      const auto critic = start(gan.critic.ptr(), small_config(GetParam(), 2), communicator).engine;
      for (int micro = 0; micro < 2; ++micro) {
        critic->backward(bce(gan.critic->forward(sample(micro, communicator.rank())), 1));
        critic->step();
        if (micro == 1 || !between) continue;
        const auto frozen = frozen_scope(gan.critic);
        generator->backward(bce(gan.critic->forward(gan.generator->forward(noise(0, communicator.rank()))), 1));
        generator->step();
      }
      const double norm = critic->get_global_grad_norm().value();
      if (communicator.rank() != 0) return;
      if (between) EXPECT_NEAR(norm, expected, kSameResult);
      expected = norm;
    });
  }
}

TEST_P(SeveralEngines, MessagesNameTheEngineWhereThereAreSeveral) {
  test::run_ranks(kRanks, [&](comm::Communicator& communicator) {
    Gan gan;
    SmallNet net;
    const auto one = start(gan.generator.ptr(), small_config(GetParam(), 1), communicator).engine;
    const auto is_plain = AllOf(HasSubstr("before backward()"), ::testing::Not(HasSubstr("the engine of")));
    EXPECT_THAT([&] { one->step(); }, ThrowsMessage<UsageError>(is_plain));
    {
      const auto other = start(gan.critic.ptr(), small_config(GetParam(), 1), communicator).engine;
      const auto third = start(net.ptr(), small_config(GetParam(), 1), communicator).engine;
      EXPECT_THAT([&] { other->step(); },
                  ThrowsMessage<UsageError>(
                      HasSubstr("(the engine of torch::nn::SequentialImpl (number 2 of 2 engines for such a model))")));
      EXPECT_THAT([&] { third->backward(torch::ones({2})); },
                  ThrowsMessage<UsageError>(AllOf(HasSubstr("expected a scalar loss"),
                                                  HasSubstr("(the engine of ds::engine::SmallNetImpl)"))));
    }
    EXPECT_THAT([&] { one->step(); }, ThrowsMessage<UsageError>(is_plain));
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, SeveralEngines, ::testing::Values(0, 1, 2, 3), stage_name);

}  // namespace
}  // namespace ds::engine
