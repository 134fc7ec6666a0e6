// Weights that are shared: by stages of a pipeline, under several names, and over one memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "dsengine/zero.h"
#include "engine/engine_impl.h"
#include "tests/model/small_run.h"
#include "tests/pipeline/layered_model.h"
#include "tests/support/borrowed.h"
#include "tests/support/flip_bit.h"
#include "tests/support/thread_ranks.h"

namespace ds::pipeline {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

nlohmann::json two_stages(int zero_stage) {
  return {{"train_micro_batch_size_per_gpu", 2},
          {"gradient_accumulation_steps", 2},
          {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-3}}}}},
          {"zero_optimization", {{"stage", zero_stage}, {"stage3_param_persistence_threshold", 20}}},
          {"pipeline", {{"stages", 2}}}};
}

TEST(TiedParameters, AModifierRankIsRefusedOnEveryStageAndTheRestCanBeChanged) {
  for (const int zero_stage : {0, 1, 3}) {
    test::run_ranks(2, [&](comm::Communicator& world) {
      const auto model =
          std::make_shared<PipelineModule>(layers_of(4, /*tied=*/true), PipelineOptions{.loss = cross_entropy});
      const auto ranks = test::borrowed(world);
      const auto engine =
          engine::initialize({.model = model, .config = two_stages(zero_stage), .communicator = ranks}).engine;
      std::vector<at::Tensor> tied;
      std::vector<at::Tensor> own;
      std::string first_own;
      for (const auto& item : model->named_parameters()) {
        const bool is_tied = item.key().starts_with("embed");
        if (!is_tied && own.empty()) first_own = item.key();
        (is_tied ? tied : own).push_back(item.value());
      }
      ASSERT_EQ(tied.size(), 1);
      ASSERT_FALSE(own.empty());
      EXPECT_THAT([&] { auto scope = engine->gathered_parameters(tied, 0); },
                  ThrowsMessage<UsageError>(AllOf(HasSubstr("embed.weight"), HasSubstr("is tied"),
                                                  HasSubstr("change it before initialize()"))));
      {
        const auto whole = engine->gathered_parameters(tied);
        EXPECT_EQ(tied[0].numel(), kVocabulary * kWidth);
      }
      {
        const auto whole = engine->gathered_parameters(own, 0);
        own[0].data().fill_(0.25);
      }
      for (const auto& [name, value] : engine->module_state_dict()) {
        EXPECT_EQ(value.eq(0.25).all().item<bool>(), name == first_own) << name;
      }
      int64_t next = 0;
      EXPECT_GT(engine->train_batch([&] { return tokens_of(next++, 0); }).item<double>(), 0.0);
    });
  }
}

// A tied weight, and what the optimizer keeps of it, is the same on all stages that have it.
TEST(TiedParameters, ALostBitOfACopyIsFoundByCheckReplicas) {
  for (const int zero_stage : {0, 3}) {
    test::run_ranks(2, [&](comm::Communicator& world) {
      const auto model =
          std::make_shared<PipelineModule>(layers_of(4, /*tied=*/true), PipelineOptions{.loss = cross_entropy});
      nlohmann::json config = two_stages(zero_stage);
      config["check_replicas"] = 1;
      const auto engine =
          engine::initialize({.model = model, .config = config, .communicator = test::borrowed(world)}).engine;
      int64_t next = 0;
      for (int step = 0; step < 3; ++step) engine->train_batch([&] { return tokens_of(next++, 0); });
      engine::Engine::Impl& impl = engine::EngineAccess::impl_of(*engine);
      std::vector<std::pair<std::string, at::Tensor>> copies;
      for (size_t b = 0; b < impl.state.buckets.size(); ++b) {
        if (impl.state.pipeline->tied_of_bucket[b] < 0) continue;
        copies.emplace_back(": embed", impl.state.buckets[b].kept());
        for (const auto& [name, values] : impl.state.optimizer.states(b)) copies.emplace_back(name, values);
      }
      ASSERT_EQ(copies.size(), 3);  // with two states of AdamW
      for (const auto& [name, values] : copies) {
        const auto flip = [&] {
          if (world.rank() == 1) test::flip_bit(values, 9 * 8 + 2);
        };
        flip();
        EXPECT_THAT([&] { impl.replicas->step_made(7); },
                    ThrowsMessage<UsageError>(AllOf(HasSubstr("after step 7, of the stages of a pipeline, tied weight"),
                                                    HasSubstr(name), HasSubstr("not the same on ranks 0 and 1"))));
        flip();
        EXPECT_NO_THROW(impl.replicas->step_made(8));
      }
    });
  }
}

}  // namespace
}  // namespace ds::pipeline

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

// A table of words that is the head's weight too.
struct TiedNet : torch::nn::Module {
  TiedNet() {
    weight = register_module("words", std::make_shared<torch::nn::Module>())
                 ->register_parameter("weight", torch::zeros({6, 6}));
    const auto head = register_module("head", std::make_shared<torch::nn::Module>());
    head->register_parameter("weight", weight);
    bias = head->register_parameter("bias", torch::zeros({6}));
    fill(*this);
  }
  at::Tensor loss(const at::Tensor& x) {
    return (torch::matmul(torch::tanh(torch::matmul(x, weight)), weight.t()) + bias).pow(2).mean();
  }
  at::Tensor weight, bias;
};

TEST(TiedNames, AGroupHasAParameterByAnyOfItsNames) {
  for (const int stage : {0, 3}) {
    const std::vector<std::string> by_star = {"head.*"};
    const std::vector<std::string> by_name = {"head.weight", "head.bias"};
    for (const std::vector<std::string>& names : {by_star, by_name}) {
      test::run_ranks(2, [&](comm::Communicator& communicator) {
        const auto model = std::make_shared<TiedNet>();
        const State before = parameters_of(*model);
        const auto engine = initialize({.model = model,
                                        .config = small_config(stage, 1),
                                        .parameter_groups = {{.parameters = names, .lr = 0.0}},
                                        .communicator = test::borrowed(communicator)})
                                .engine;
        engine->backward(model->loss(sample(0, communicator.rank())));
        engine->step();
        for (const auto& [name, value] : engine->module_state_dict()) {
          EXPECT_TRUE(value.equal(before.at(name))) << name << " at stage " << stage;
        }
      });
    }
  }
}

TEST(TiedNames, OneTensorInTwoGroupsIsRefusedWithBothNames) {
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    EXPECT_THAT(
        [&] {
          initialize(
              {.model = std::make_shared<TiedNet>(),
               .config = small_config(0, 1),
               .parameter_groups = {{.parameters = {"words.*"}, .lr = 0.1}, {.parameters = {"head.*"}, .lr = 0.2}},
               .communicator = test::borrowed(communicator)});
        },
        ThrowsMessage<UsageError>(AllOf(HasSubstr("words.weight is in group 0"), HasSubstr("as head.weight"),
                                        HasSubstr("the same tensor"), HasSubstr("group 1"))));
  });
}

// An autoencoder whose decoder shows the encoder's weight turned over.
torch::nn::Sequential turned_over() {
  torch::nn::Sequential model(torch::nn::Linear(6, 4), torch::nn::Tanh(), torch::nn::Linear(4, 6));
  model->ptr<torch::nn::LinearImpl>(2)->weight.set_data(model->ptr<torch::nn::LinearImpl>(0)->weight.detach().t());
  return model;
}

const auto kBothNames = AllOf(HasSubstr("0.weight"), HasSubstr("2.weight"), HasSubstr("one memory"),
                              HasSubstr("register one tensor under both names"));

TEST(SharedMemory, TwoParametersOverItAreRefusedByName) {
  for (const int stage : {0, 3}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      EXPECT_THAT([&] { start(turned_over().ptr(), small_config(stage, 1), communicator); },
                  ThrowsMessage<UsageError>(kBothNames));
      const auto ranks = test::borrowed(communicator);
      zero::Init init(ranks, {.max_live = 0, .smallest = 1});
      const torch::nn::Sequential model = turned_over();
      EXPECT_THAT(
          [&] {
            initialize({.model = model.ptr(), .config = small_config(stage, 1), .init = &init, .communicator = ranks});
          },
          ThrowsMessage<UsageError>(kBothNames));
    });
  }
}

TEST(SharedMemory, WithoutACommonElementOrWithoutTrainingIsFine) {
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    torch::nn::Sequential columns(torch::nn::Linear(4, 3), torch::nn::Linear(4, 3));
    {
      const at::Tensor both = torch::ones({3, 8});
      columns->ptr<torch::nn::LinearImpl>(0)->weight.set_data(both.narrow(1, 0, 4));
      columns->ptr<torch::nn::LinearImpl>(1)->weight.set_data(both.narrow(1, 4, 4));
    }
    EXPECT_NO_THROW(start(columns.ptr(), small_config(0, 1), communicator));
    torch::nn::Sequential frozen = turned_over();
    frozen->ptr<torch::nn::LinearImpl>(0)->weight.set_requires_grad(false);
    frozen->ptr<torch::nn::LinearImpl>(2)->weight.set_requires_grad(false);
    EXPECT_NO_THROW(start(frozen.ptr(), small_config(3, 1), communicator));
  });
}

// Returns what initialize() logs for a network of which `keep` holds a part.
template <class Keep>
std::string log_of_start(const Keep& keep) {
  testing::internal::CaptureStderr();
  testing::internal::CaptureStdout();
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    [[maybe_unused]] const auto kept = keep(*model);
    start(model.ptr(), small_config(1, 1), communicator);
  });
  return testing::internal::GetCapturedStderr() + testing::internal::GetCapturedStdout();
}

TEST(SharedMemory, AnotherOwnerIsToldAndAnOptimizerIsNone) {
  const char* const warning = "the memory of parameter";
  EXPECT_THAT(log_of_start([](SmallNetImpl& model) { return model.last->weight.detach(); }),
              AllOf(HasSubstr(warning), HasSubstr("last.weight is held by another tensor"), HasSubstr("clone()")));
  EXPECT_THAT(
      log_of_start([](SmallNetImpl& model) { return model.register_buffer("shown", model.first->bias.detach()); }),
      HasSubstr("first.bias is held by the buffer shown"));
  std::vector<float> own(11, 0.5F);
  EXPECT_THAT(log_of_start([&](SmallNetImpl& model) {
                model.first->bias.set_data(torch::from_blob(own.data(), {11}));
                return 0;
              }),
              HasSubstr("first.bias is held by the program (from_blob())"));
  EXPECT_THAT(log_of_start([](SmallNetImpl& model) {
                return std::make_unique<torch::optim::SGD>(model.parameters(), torch::optim::SGDOptions(0.1));
              }),
              Not(HasSubstr(warning)));
}

}  // namespace
}  // namespace ds::engine
