// Models that a program has converted by itself, complex ones, BatchNorm in 16 bits, and seeds: what the plan says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "core/check.h"
#include "tests/porting/ported_run.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::ThrowsMessage;

std::string logged_by(const std::function<void()>& action) {
  ::testing::internal::CaptureStderr();
  action();
  return ::testing::internal::GetCapturedStderr();
}

Plan plan_of(SmallNet& model, const ordered_json& config) {
  Plan plan;
  test::run_ranks(
      1, [&](comm::Communicator& communicator) { plan = start(model.ptr(), config, communicator).engine->plan(); });
  return plan;
}

TEST(GivenDtypes, AModelInSixteenBitsWithoutTheSectionIsToldOf) {
  for (const auto& [dtype, name] : {std::pair(torch::kBFloat16, "bf16"), std::pair(torch::kHalf, "fp16")}) {
    SmallNet model;
    model->to(dtype);
    Plan plan;
    const std::string log = logged_by([&] { plan = plan_of(model, small_config(2, 1)); });
    EXPECT_EQ(model->first->weight.scalar_type(), at::kFloat);
    const auto says = AllOf(HasSubstr(cat("6 of 6 parameters (first.weight, ...) are ", name)),
                            HasSubstr("cast to fp32"), HasSubstr(cat("write \"", name, "\": {\"enabled\": true}")));
    EXPECT_THAT(plan.warnings, ElementsAre(says));
    EXPECT_THAT(log, AllOf(HasSubstr("warning"), says));
    EXPECT_THAT(to_table(plan), HasSubstr(cat("6 of 6 parameters (first.weight, ...) from ", name, " to fp32")));
  }
}

TEST(GivenDtypes, OneLayerInSixteenBitsIsToldOfByName) {
  SmallNet model;
  model->last->to(torch::kBFloat16);
  const Plan plan = plan_of(model, small_config(0, 1));
  EXPECT_THAT(plan.warnings, ElementsAre(HasSubstr("2 of 6 parameters (last.weight, ...) are bf16")));
}

// What the config asks for is said in the plan, and is no warning.
TEST(GivenDtypes, WithTheSectionThereIsNothingToWarnOf) {
  SmallNet model;
  model->to(torch::kBFloat16);
  const Plan same = plan_of(model, with_bf16(small_config(0, 1)));
  EXPECT_THAT(same.warnings, IsEmpty());
  EXPECT_THAT(to_table(same), Not(HasSubstr("cast")));
  model->to(torch::kHalf);
  const Plan other = plan_of(model, with_bf16(small_config(0, 1)));
  EXPECT_THAT(other.warnings, IsEmpty());
  EXPECT_THAT(to_table(other), HasSubstr("6 of 6 parameters (first.weight, ...) from fp16 to bf16"));
  SmallNet plain;
  const Plan usual = plan_of(plain, small_config(0, 1));
  EXPECT_THAT(usual.warnings, IsEmpty());
  EXPECT_THAT(to_table(usual), Not(HasSubstr("cast")));
}

struct Rotation : torch::nn::Module {
  explicit Rotation(bool trained) {
    const at::Tensor values = torch::complex(torch::ones({3}), torch::zeros({3}));
    turn = trained ? register_parameter("turn", values) : register_buffer("turn", values);
    weight = register_parameter("weight", torch::ones({3}));
  }
  at::Tensor turn, weight;
};

// An order of columns, registered as a parameter that is not trained. A change of all dtypes would break it.
TEST(IntegerParameters, AreToldToBeBuffers) {
  SmallNet model;
  model->last->register_parameter("order", torch::arange(8), /*requires_grad=*/false);
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    EXPECT_THAT(
        [&] { start(model.ptr(), small_config(2, 1), communicator); },
        ThrowsMessage<UsageError>(AllOf(HasSubstr("parameter last.order"), HasSubstr("Long [8]"),
                                        HasSubstr("register_buffer(\"order\", values)"), Not(HasSubstr("kFloat")))));
  });
}

TEST(ComplexModels, AreRefusedWithAWayThatLosesNothing) {
  test::run_ranks(1, [](comm::Communicator& communicator) {
    for (const bool trained : {true, false}) {
      EXPECT_THAT(
          [&] { start(std::make_shared<Rotation>(trained), small_config(1, 1), communicator); },
          ThrowsMessage<UsageError>(AllOf(HasSubstr(trained ? "parameter turn" : "buffer turn"),
                                          HasSubstr("ComplexFloat"), HasSubstr("torch::view_as_real"),
                                          HasSubstr("torch::view_as_complex"), HasSubstr("drop the imaginary parts"))));
    }
  });
}

// The way that the message names, with gradients through the complex numbers, against complex parameters in torch.
TEST(ComplexModels, KeptAsRealPairsTrainAsInTorch) {
  struct Turned : torch::nn::Module {
    Turned() {
      pairs = register_parameter("pairs", torch::view_as_real(torch::polar(torch::ones({3}), torch::arange(3) * 0.5)));
    }
    at::Tensor pairs;
  };
  const auto loss_of = [](const at::Tensor& turn, int step, int rank) {
    const at::Tensor input = sample(step, rank).narrow(1, 0, 3);
    return torch::view_as_real(input * turn - torch::complex(input.sin(), input)).pow(2).mean();
  };
  at::Tensor turn = torch::view_as_complex(Turned().pairs.detach().clone()).clone().requires_grad_(true);
  for (int step = 0; step < 5; ++step) {
    turn.mutable_grad() = at::Tensor();
    for (const int rank : {0, 1}) (loss_of(turn, step, rank) / 2).backward();
    const torch::NoGradGuard no_grad;
    turn.sub_(turn.grad() * 0.1);
  }
  ordered_json config = small_config(0, 1);
  config["optimizer"] = {{"type", "SGD"}, {"params", {{"lr", 0.1}}}};
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const auto model = std::make_shared<Turned>();
    const auto engine = start(model, config, communicator).engine;
    for (int step = 0; step < 5; ++step) {
      engine->backward(loss_of(torch::view_as_complex(model->pairs), step, communicator.rank()));
      engine->step();
    }
    EXPECT_LT((model->pairs.detach() - torch::view_as_real(turn.detach())).abs().max().item<double>(), kSameResult);
  });
}

struct NormedNetImpl : torch::nn::Module {
  NormedNetImpl() {
    register_module("first", first);
    register_module("norm", norm);
    register_module("last", last);
    fill(*this);
  }
  at::Tensor loss(const at::Tensor& x) {
    const at::Tensor typed = x.to(first->weight.scalar_type());
    return (last(torch::tanh(norm(first(typed)))) - typed.narrow(1, 0, 3).sin()).pow(2).mean();
  }
  torch::nn::Linear first{6, 11};
  torch::nn::BatchNorm1d norm{11};
  torch::nn::Linear last{11, 3};
};
TORCH_MODULE(NormedNet);

// As module.bfloat16() of DeepSpeed: running statistics are cast, the count of batches is not.
TEST(BatchNormInSixteenBits, TrainsAsOneThatTorchHasConverted) {
  for (const auto& [dtype, section] : {std::pair(torch::kBFloat16, "bf16"), std::pair(torch::kHalf, "fp16")}) {
    NormedNet plain;
    plain->to(dtype);
    const double expected = plain->loss(sample(0, 0)).item<double>();
    const at::Tensor statistics = plain->norm->running_mean.clone();
    for (const int stage : {0, 1, 2, 3}) {
      ordered_json config = small_config(stage, 1);
      config[section] = {{"enabled", true}};
      test::run_ranks(1, [&, wanted = dtype](comm::Communicator& communicator) {
        NormedNet model;
        const auto engine = start(model.ptr(), config, communicator).engine;
        EXPECT_EQ(engine->plan().buffer_dtype, engine->plan().model_dtype);
        const at::Tensor first = model->loss(sample(0, 0));
        EXPECT_EQ(first.item<double>(), expected);
        EXPECT_EQ(model->norm->running_mean.scalar_type(), wanted);
        EXPECT_TRUE(model->norm->running_mean.equal(statistics));
        EXPECT_EQ(model->norm->num_batches_tracked.scalar_type(), at::kLong);
        engine->backward(first);
        engine->step();
        for (int step = 1; step < 4; ++step) {
          engine->backward(model->loss(sample(step, 0)));
          engine->step();
        }
        EXPECT_LT(model->loss(sample(0, 0)).item<double>(), expected);
      });
    }
  }
}

TEST(BatchNormInSixteenBits, BuffersStayAsTheyAreWhereTheConfigSaysSo) {
  ordered_json config = with_bf16(small_config(0, 1));
  config["data_types"]["buffer_dtype"] = "fp32";
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    NormedNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    EXPECT_EQ(model->norm->running_mean.scalar_type(), at::kFloat);
    EXPECT_EQ(model->norm->weight.scalar_type(), at::kBFloat16);
  });
}

TEST(Seeds, ThePlanSaysThatTheyAreSetAndHowToKeepOnesOwn) {
  ordered_json config = small_config(0, 1);
  config["seed"] = 77;
  for (const bool seeds : {true, false}) {
    test::run_ranks(1, [&](comm::Communicator& communicator) {
      SmallNet model;
      torch::manual_seed(5);
      const at::Tensor own = torch::rand({4});
      torch::manual_seed(5);
      const auto engine = initialize({.model = model.ptr(),
                                      .config = config,
                                      .communicator = borrowed(communicator),
                                      .seed_generators = seeds})
                              .engine;
      EXPECT_EQ(torch::rand({4}).equal(own), !seeds);
      const std::string table = to_table(engine->plan());
      if (seeds) {
        EXPECT_THAT(table, AllOf(HasSubstr("77 + rank"), HasSubstr("seed_generators = false")));
      } else {
        EXPECT_THAT(table, AllOf(Not(HasSubstr("77 + rank")), HasSubstr("the program's own")));
      }
    });
  }
}

}  // namespace
}  // namespace ds::engine
