// Ranks whose weights or optimizer states part between steps, and ranks of which one saves alone: named at the next
// step, or at a save before it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <exception>
#include <memory>
#include <string>

#include "core/check.h"
#include "tests/porting/ported_run.h"
#include "tests/support/scratch_folder.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class SavesOfOneRank : public ::testing::TestWithParam<int> {};
class PartedWeights : public ::testing::TestWithParam<int> {};

// `if (rank == 0) engine->save_checkpoint(...)`, the usual mistake.
TEST_P(SavesOfOneRank, ASaveAloneIsNamedByItsCall) {
  const test::ScratchFolder folder;
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    const auto step = [&] {
      if (communicator.rank() == 0) engine->save_checkpoint(folder / "checkpoints");
      train(*engine, model, 1);
    };
    EXPECT_THAT(step, ThrowsMessage<std::exception>(HasSubstr("rank 0 is in save_checkpoint(), rank 1 in backward()")));
  });
}

TEST_P(SavesOfOneRank, AWaitAloneIsNamedByItsCall) {
  const test::ScratchFolder folder;
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    const auto step = [&] {
      engine->save_checkpoint(folder / "checkpoints", "tag", {.asynchronous = true});
      if (communicator.rank() == 0) engine->wait_for_checkpoint();
      train(*engine, model, 1);
    };
    EXPECT_THAT(step,
                ThrowsMessage<std::exception>(HasSubstr("rank 0 is in wait_for_checkpoint(), rank 1 in backward()")));
  });
}

// Each rank writes a part of a checkpoint, and the next step() would come too late.
TEST_P(PartedWeights, AreNamedByASaveBeforeTheStep) {
  const test::ScratchFolder folder;
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    train(*engine, model, 1);
    engine->save_checkpoint(folder.path().string(), "good");
    {
      const torch::NoGradGuard no_grad;
      model->last->bias.fill_(communicator.rank());
    }
    EXPECT_THAT([&] { engine->save_checkpoint(folder.path().string(), "bad"); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("save_checkpoint(): the ranks have changed"),
                                                HasSubstr("rank 1: changed last.bias (values "))));
    engine->load_checkpoint(folder.path().string(), "good");
    train(*engine, model, 1);
  });
}

// The first moment of the first tensor that it steps on.
at::Tensor& moment_of(torch::optim::AdamW& client) {
  auto& state = *client.state().at(client.param_groups()[0].params()[0].unsafeGetTensorImpl());
  return static_cast<torch::optim::AdamWParamState&>(state).exp_avg();
}

// States of a program's optimizer that one rank changes between steps, in place or by a file.
TEST(PartedStates, AreNamedBeforeTheStepAndOnceMendedItIsMade) {
  const test::ScratchFolder folder;
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const auto run = [&](bool is_wrong) {
      SmallNet model;
      const auto client = std::make_shared<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(0.02));
      const auto engine = initialize({.model = model.ptr(),
                                      .config = small_config(0, 1),
                                      .optimizer = client,
                                      .communicator = borrowed(communicator)})
                              .engine;
      const auto step = [&](int batch) {
        engine->backward(model->loss(sample(batch, communicator.rank())));
        engine->step();
      };
      const std::string file = folder / std::to_string(communicator.rank());
      step(0);
      torch::save(*client, file);
      step(1);
      torch::save(*client, file + ".next");
      const bool second = communicator.rank() == 1;
      if (is_wrong) {
        const auto refused = [&](const std::string& expected) {
          EXPECT_THAT([&] { step(2); },
                      ThrowsMessage<UsageError>(AllOf(HasSubstr(expected), HasSubstr("Nothing was applied"))));
        };
        const at::Tensor kept = moment_of(*client).clone();
        if (second) moment_of(*client).mul_(2);
        refused("the optimizer state exp_avg of bucket 0: values of norm ");
        if (second) moment_of(*client).copy_(kept);
        if (second) torch::load(*client, file);
        refused("steps of all states");
        if (second) torch::load(*client, file + ".next");  // now the same as on the other rank, which has changed none
      }
      step(2);
      step(3);
      return copy_of(engine->fp32_state_dict());
    };
    EXPECT_EQ(largest_difference(run(true), run(false)), 0.0);
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, SavesOfOneRank, ::testing::Values(0, 1, 2), stage_name);
INSTANTIATE_TEST_SUITE_P(Stages, PartedWeights, ::testing::Values(0, 1, 2, 3), stage_name);

}  // namespace
}  // namespace ds::engine
