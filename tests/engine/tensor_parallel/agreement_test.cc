// Ranks of a tensor axis that do not run the same program on the same data are told so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/split/split_tensor.h"
#include "dsengine/optimizer.h"
#include "engine/engine_impl.h"
#include "tests/engine/tensor_parallel/split_training.h"
#include "tests/support/count_of.h"
#include "tests/support/flip_bit.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(TensorParallelAgreement, AnotherBatchOnOneRankNamesBothAndTheAxis) {
  const GptRun run{.tensor = 2, .data = 2, .stage = 1};
  test::run_ranks(4, [&](comm::Communicator& world) {
    const auto net = run.make();
    const auto engine = run.start(world, net).engine;
    const auto step = [&](int data_rank) {
      const GptBatch batch = gpt_batch(0, data_rank, run.model);
      engine->backward(net->forward(batch.tokens, batch.targets));
      engine->step();
    };
    step(engine->communicator().rank());
    // Ranks 2 and 3 are the second axis; the first one has done nothing wrong.
    const bool wrong = world.rank() == 3;
    if (world.rank() < 2) {
      EXPECT_THAT([&] { step(0); }, ThrowsMessage<UsageError>(HasSubstr("ranks of another tensor axis")));
    } else {
      EXPECT_THAT([&] { step(wrong ? 7 : 1); },
                  ThrowsMessage<UsageError>(AllOf(HasSubstr("ranks 2 and 3 of one tensor axis got different batches"),
                                                  HasSubstr("dp_world_size"))));
    }
    // The state is as it was.
    step(engine->communicator().rank());
    EXPECT_EQ(engine->global_steps(), 2);
  });
}

// Layers of numbers: their outputs are split, and the loss of both ranks is the same where their inputs are not.
std::shared_ptr<torch::nn::SequentialImpl> layers_of_numbers() {
  auto net = std::make_shared<torch::nn::SequentialImpl>(torch::nn::Linear(12, 48), torch::nn::GELU(),
                                                         torch::nn::Linear(48, 10));
  const torch::NoGradGuard no_grad;
  for (const at::Tensor& parameter : net->parameters()) {
    parameter.copy_(torch::arange(parameter.numel()).sin().view(parameter.sizes()) * 0.3);
  }
  return net;
}

std::shared_ptr<Engine> start_of_numbers(comm::Communicator& world,
                                         const std::shared_ptr<torch::nn::SequentialImpl>& net) {
  using enum parallel::Style;
  return initialize({.model = net,
                     .config = GptRun{.tensor = 2}.config(),
                     .split = {{.pattern = "0", .style = kColumn}, {.pattern = "2", .style = kRow}},
                     .communicator = {std::shared_ptr<void>(), &world}})
      .engine;
}

TEST(TensorParallelAgreement, OtherNumbersOnOneRankAreToldAndOtherLastBitsAreNot) {
  test::run_ranks(2, [&](comm::Communicator& world) {
    const auto net = layers_of_numbers();
    const auto engine = start_of_numbers(world, net);
    const at::Tensor numbers = torch::arange(48).view({4, 12}).cos();
    const at::Tensor mask = torch::zeros({4, 12}).masked_fill(numbers.lt(0), -std::numeric_limits<float>::infinity());
    const auto step = [&](const at::Tensor& input) {
      const at::Tensor loss = net->forward(input).pow(2).mean();
      engine->backward(loss);
      engine->step();
    };
    step(numbers);
    step(numbers * (1 + 1e-6 * world.rank()));
    step(numbers.to(at::kDouble).add(1e-7 * world.rank()).to(at::kFloat));
    step(torch::zeros({4, 12}));
    const bool other = world.rank() == 1;
    const at::Tensor changed[] = {numbers.flip({1}), numbers * 1.5, numbers.roll(1, 0), torch::zeros({4, 12})};
    for (const at::Tensor& input : changed) {
      EXPECT_THAT([&] { step(other ? input : numbers); },
                  ThrowsMessage<UsageError>(AllOf(HasSubstr("ranks 0 and 1 of one tensor axis got different batches"),
                                                  HasSubstr("of its numbers"))));
    }
    step(numbers);
    EXPECT_EQ(engine->global_steps(), 5);
    // A mask of zeros and minus infinity.
    const at::Tensor weight = net->named_parameters()["0.weight"];
    const auto masked = [&](const at::Tensor& own) {
      engine->backward(net->forward(numbers).mean() + (weight.narrow(0, 0, 4) + own).exp().mean());
      engine->step();
    };
    masked(mask);
    EXPECT_THAT([&] { masked(other ? mask.flip({0}) : mask); }, ThrowsMessage<UsageError>(HasSubstr("got different")));
  });
}

TEST(TensorParallelAgreement, TwoEnginesOverTheSameRanksMeet) {
  test::run_ranks(2, [&](comm::Communicator& world) {
    const auto a = layers_of_numbers();
    const auto b = layers_of_numbers();
    const auto first = start_of_numbers(world, a);
    const auto second = start_of_numbers(world, b);
    const at::Tensor input = torch::arange(48).view({4, 12}).cos();
    const at::Tensor own = a->ptr(0)->as<torch::nn::Linear>()->forward(input);
    const at::Tensor other = b->ptr(0)->as<torch::nn::Linear>()->forward(input);
    ASSERT_TRUE(is_split(own) && is_split(other));
    EXPECT_FLOAT_EQ(parallel::whole(own + other).sum().item<float>(), 2 * parallel::whole(own).sum().item<float>());
  });
}

TEST(TensorParallelAgreement, AnotherLossOnOneRank) {
  const GptRun run{.tensor = 2};
  test::run_ranks(2, [&](comm::Communicator& world) {
    const auto net = run.make();
    const auto engine = run.start(world, net).engine;
    const GptBatch batch = gpt_batch(0, 0, run.model);
    engine->backward(net->forward(batch.tokens, batch.targets) * (world.rank() + 1));
    EXPECT_THAT([&] { engine->step(); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("ranks 0 and 1 of one tensor axis have different losses"))));
  });
}

TEST(TensorParallelAgreement, AnotherRateOnOneRankIsNamedBeforeTheStepIsApplied) {
  const GptRun run{.tensor = 2, .data = 2, .stage = 1};
  test::run_ranks(4, [&](comm::Communicator& world) {
    const auto net = run.make();
    const auto engine = run.start(world, net).engine;
    const auto step = [&] {
      const GptBatch batch = gpt_batch(0, engine->communicator().rank(), run.model);
      engine->backward(net->forward(batch.tokens, batch.targets));
      engine->step();
    };
    step();
    const auto set_rate = [&](double rate) { engine->optimizer()->groups()[0].lr = rate; };
    if (world.rank() == 3) set_rate(0.5);
    if (world.rank() < 2) {
      EXPECT_THAT(step, ThrowsMessage<UsageError>(HasSubstr("ranks of another tensor axis")));
    } else {
      EXPECT_THAT(step,
                  ThrowsMessage<UsageError>(AllOf(HasSubstr("lr of parameter group 0: 0.002 on rank 2, 0.5 on rank 3"),
                                                  HasSubstr("Nothing was applied"))));
    }
    // Both ranks of an axis: the data-parallel ranks of each have two rates.
    if (world.rank() >= 2) set_rate(0.5);
    const int own = world.rank() % 2;
    EXPECT_THAT(step,
                ThrowsMessage<UsageError>(HasSubstr("lr of parameter group 0: 0.002 on rank " + std::to_string(own) +
                                                    ", 0.5 on rank " + std::to_string(own + 2))));
    set_rate(0.002);
    step();
    EXPECT_EQ(engine->global_steps(), 2);
  });
}

TEST(TensorParallelAgreement, OtherRulesOnOneRank) {
  const GptRun run{.tensor = 2};
  test::run_ranks(2, [&](comm::Communicator& world) {
    auto rules = gpt_rules(run.model);
    if (world.rank() == 1) rules[2].style = parallel::Style::kWhole;
    EXPECT_THAT(
        [&] {
          initialize({.model = run.make(),
                      .config = run.config(),
                      .split = rules,
                      .communicator = {std::shared_ptr<void>(), &world}});
        },
        ThrowsMessage<CommError>(AllOf(HasSubstr("rule 2 of .split"), HasSubstr("rank 1"))));
  });
}

TEST(TensorParallelAgreement, AModelThatIsConvertedAfterwardsNamesTheParameter) {
  const GptRun run{.tensor = 2};
  test::run_ranks(2, [&](comm::Communicator& world) {
    const auto net = run.make();
    const auto engine = run.start(world, net).engine;
    const GptBatch batch = gpt_batch(0, 0, run.model);
    const at::Tensor loss = net->forward(batch.tokens, batch.targets);
    try {
      net->to(at::kDouble);
      ADD_FAILURE() << "parts do not follow";
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("wte.weight"), HasSubstr("tensor axis"), HasSubstr("model->to()")));
    }
    engine->backward(loss);  // nothing was converted
  });
}

TEST(TensorParallelAgreement, ASplitModuleIsNotSplitAgain) {
  test::run_ranks(1, [&](comm::Communicator& world) {
    const GptRun run{.tensor = 1};
    const auto net = run.make();
    const auto engine = run.start(world, net).engine;
    EXPECT_TRUE(engine->joined_operators().empty());
    EXPECT_EQ(engine->mp_world_size(), 1);
  });
}

TEST(TensorParallelAgreement, RanksThatDoNotDivide) {
  test::run_ranks(3, [&](comm::Communicator& world) {
    const GptRun run{.tensor = 2};
    EXPECT_THAT([&] { run.start(world, run.make()); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("tensor_parallel"), HasSubstr("found 2"))));
  });
}

// A replicated weight, or what the optimizer keeps of it, that has lost a bit on one rank of the axis.
TEST(TensorParallelAgreement, EachFlippedBitOfAReplicatedParameterIsTold) {
  constexpr int kFlips = 100;
  for (const char* precision : {"", "bf16"}) {
    nlohmann::json more = nlohmann::json::object();
    if (*precision != '\0') more[precision]["enabled"] = true;
    const GptRun run{.tensor = 2, .stage = *precision == '\0' ? 1 : 0, .steps = 2, .more = more};
    int errors = 0;  // of rank 0: a bit that makes NaN or infinity
    ::testing::internal::CaptureStderr();
    test::run_ranks(2, [&](comm::Communicator& world) {
      const auto net = run.make();
      const auto engine = run.start(world, net).engine;
      run.train(*engine, *net);
      engine->synchronize_parameters();
      Engine::Impl& impl = EngineAccess::impl_of(*engine);
      std::vector<at::Tensor> replicas;
      for (size_t b = 0; b < impl.state.buckets.size(); ++b) {
        if (impl.state.is_part(b)) continue;
        const auto& segment = impl.state.buckets[b].layout().segments.front();
        const auto add = [&](const at::Tensor& all) {
          replicas.push_back(all.narrow(0, segment.slice_offset, segment.length));
        };
        add(impl.state.buckets[b].flat());
        add(impl.state.masters[b]);
        for (const auto& [name, values] : impl.state.optimizer.states(b)) add(values);
      }
      ASSERT_GE(replicas.size(), 4);
      std::mt19937_64 draws(5);
      for (int i = 0; i < kFlips; ++i) {
        const at::Tensor& values = replicas[draws() % replicas.size()];
        const size_t bit = draws() % (8 * values.nbytes());
        const bool is_wrong = static_cast<int>(draws() % 2) == world.rank();
        const auto flip = [&] {
          if (is_wrong) test::flip_bit(values, bit);
        };
        flip();
        try {
          impl.replicas->step_made(100 + i);
        } catch (const UsageError&) {
          if (world.rank() == 0) ++errors;
        }
        flip();
        EXPECT_NO_THROW(impl.replicas->step_made(100 + i));
      }
    });
    const std::string log = ::testing::internal::GetCapturedStderr();
    const auto told = static_cast<int>(test::count_of(log, "of the ranks of one tensor axis, "));
    EXPECT_EQ(told + errors, kFlips) << precision << log;
    EXPECT_GT(told, kFlips / 4);
  }
}

}  // namespace
}  // namespace ds::engine
