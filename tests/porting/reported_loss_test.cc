// The loss where people look for it, and warnings of training that changes nothing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <string>

#include "dsengine/errors.h"
#include "tests/porting/ported_run.h"
#include "tests/support/scratch_folder.h"

namespace ds::engine {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class ReportedLoss : public ::testing::TestWithParam<int> {};

// The mean over ranks and micro-batches.
TEST_P(ReportedLoss, IsThatOfTheGlobalBatchInMonitorsAndInTheLineOfAStep) {
  const test::ScratchFolder folder;
  nlohmann::ordered_json config = small_config(GetParam(), 2);
  config["csv_monitor"] = {{"enabled", true}, {"output_path", folder.path().string()}, {"job_name", "run"}};
  config["steps_per_print"] = 1;
  double expected = 0;
  {
    SmallNet model;
    const torch::NoGradGuard no_grad;
    for (int rank = 0; rank < 2; ++rank) {
      for (int micro = 0; micro < 2; ++micro) expected += model->loss(sample(micro, rank)).item<double>() / 4;
    }
  }
  ::testing::internal::CaptureStderr();
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    train(*engine, model, 1);
  });
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr("step=1, loss="));
  std::ifstream csv(folder / "run/Train_Samples_train_loss.csv");
  std::string line;
  std::getline(csv, line);
  std::getline(csv, line);
  ASSERT_NE(line.find(','), std::string::npos) << line;
  EXPECT_NEAR(std::stod(line.substr(line.find(',') + 1)), expected, 1e-6);
}

std::string log_of(int stage, const std::function<at::Tensor(SmallNet&, int step, int rank)>& loss) {
  ::testing::internal::CaptureStderr();
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(stage, 1), communicator).engine;
    for (int step = 0; step < 3; ++step) {
      engine->backward(loss(model, step, communicator.rank()));
      engine->step();
    }
  });
  return ::testing::internal::GetCapturedStderr();
}

TEST_P(ReportedLoss, OfAnotherModelIsAWarning) {
  const std::string log = log_of(GetParam(), [](SmallNet&, int step, int rank) {
    SmallNet other;
    return other->loss(sample(step, rank));
  });
  EXPECT_THAT(log, HasSubstr("step 1: no parameter of the model got a gradient on this rank"));
  EXPECT_THAT(log, Not(HasSubstr("step 2: no parameter")));  // said once
}

TEST_P(ReportedLoss, WithoutAnyGradientTwiceIsAWarning) {
  const auto zero = [](SmallNet& model, int step, int rank) { return model->loss(sample(step, rank)) * 0; };
  EXPECT_THAT(log_of(GetParam(), zero), HasSubstr("step 2: all gradients are zero, for the second time in a row"));
  const auto once = [](SmallNet& model, int step, int rank) {
    return model->loss(sample(step, rank)) * (step == 1 ? 0 : 1);
  };
  EXPECT_THAT(log_of(GetParam(), once), Not(HasSubstr("all gradients are zero")));
}

// mean() averages what each rank measures; agree() makes all ranks follow the decision of one, as to stop early.
TEST_P(ReportedLoss, MeansAndDecisionsAreThoseOfAllRanks) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    const int rank = communicator.rank();
    const at::Tensor own = torch::tensor({1.0F, 2.0F}) * (rank + 1);
    EXPECT_TRUE(engine->mean(own).equal(torch::tensor({1.5F, 3.0F})));
    EXPECT_TRUE(own.equal(torch::tensor({1.0F, 2.0F}) * (rank + 1))) << "a new tensor";
    EXPECT_TRUE(engine->mean(torch::tensor(int64_t{rank})).equal(torch::tensor(0.5, torch::kDouble)));
    EXPECT_TRUE(engine->mean(torch::full({2}, 6e4 * rank, torch::kHalf)).equal(torch::full({2}, 3e4)));
    EXPECT_FALSE(engine->mean(model->loss(sample(0, rank))).requires_grad());
    int steps = 0;
    for (bool stops = false; !stops && steps < 9;) {
      engine->backward(model->loss(sample(steps, rank)));
      engine->step();
      ++steps;
      stops = engine->agree(rank == 1 && steps == 3);
    }
    EXPECT_EQ(steps, 3);
    EXPECT_THAT([&] { engine->mean(torch::zeros({2}).to_sparse()); },
                ::testing::ThrowsMessage<UsageError>(HasSubstr("mean(): expected a dense tensor")));
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, ReportedLoss, ::testing::Values(0, 1, 2, 3), stage_name);

}  // namespace
}  // namespace ds::engine
