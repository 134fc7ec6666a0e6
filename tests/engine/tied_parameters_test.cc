// Weights that stages of a pipeline share, in scopes of gathered_parameters().
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "core/check.h"
#include "tests/pipeline/layered_model.h"
#include "tests/support/borrowed.h"
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

}  // namespace
}  // namespace ds::pipeline
