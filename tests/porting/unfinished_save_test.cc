// Checkpoints that a program saves inside an accumulation, as a timer or a signal makes it.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/porting/ported_run.h"
#include "tests/support/scratch_folder.h"

namespace ds::engine {
namespace {

constexpr int kAccumulation = 3;

class Rows : public torch::data::datasets::Dataset<Rows> {
 public:
  torch::data::Example<> get(size_t index) override {
    return {sample(static_cast<int64_t>(index), 0).select(0, 0), torch::zeros({1})};
  }
  torch::optional<size_t> size() const override { return 96; }
};

struct SavingRun {
  SavingRun(comm::Communicator& communicator, int stage) {
    auto config = small_config(stage, kAccumulation);
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = true;
    parts = initialize({.model = model.ptr(),
                        .config = config,
                        .training_data = Rows(),
                        .communicator = borrowed(communicator),
                        .seed_generators = communicator.size() == 1});
  }
  Initialized parts;
  SmallNet model;
};

// What a run does in its micro-batch of this number, before backward() or after it.
struct Interruption {
  int64_t at = -1;
  bool after_backward = false;
  std::function<void(Engine&)> action = {};
};

constexpr int64_t kMicroBatches = 12;

// `noisy`: the program draws random numbers, which ranks that are threads share.
State run_to_the_end(SavingRun& run, bool noisy, const Interruption& interruption = {}) {
  Engine& engine = *run.parts.engine;
  const auto interrupt = [&](int64_t number, bool after_backward) {
    if (number == interruption.at && after_backward == interruption.after_backward) interruption.action(engine);
  };
  for (const auto& batch : *run.parts.loader) {
    const int64_t number = engine.micro_steps();
    interrupt(number, false);
    const at::Tensor noise = noisy ? torch::rand({4, 6}) * 0.1 : torch::zeros({4, 6});
    engine.backward(run.model->loss(batch.data + noise));
    interrupt(number, true);
    engine.step();
    if (engine.micro_steps() == kMicroBatches) break;
  }
  return copy_of(engine.fp32_state_dict());
}

void expect_goes_on_bit_equal(int stage, int ranks, bool noisy, Interruption save) {
  const test::ScratchFolder folder;
  const std::string path = folder.path().string();
  save.action = [&path](Engine& engine) {
    engine.save_checkpoint(path, "inside");
    EXPECT_TRUE(std::filesystem::exists(engine.save_16bit_model(path)));
  };
  test::run_ranks(ranks, [&](comm::Communicator& communicator) {
    State expected;
    {
      SavingRun whole(communicator, stage);
      expected = run_to_the_end(whole, noisy);
    }
    {
      SavingRun saves(communicator, stage);
      EXPECT_EQ(largest_difference(run_to_the_end(saves, noisy, save), expected), 0.0) << "the run that saves";
    }
    SavingRun goes_on(communicator, stage);
    Engine& engine = *goes_on.parts.engine;
    ASSERT_TRUE(engine.load_checkpoint(path, "inside"));
    const int64_t steps = save.at / kAccumulation;
    EXPECT_EQ(engine.global_steps(), steps);
    EXPECT_EQ(engine.micro_steps(), steps * kAccumulation);
    EXPECT_EQ(engine.global_samples(), steps * kAccumulation * 4 * ranks);
    EXPECT_EQ(largest_difference(run_to_the_end(goes_on, noisy), expected), 0.0) << "the run that loads";
  });
}

class UnfinishedSaves : public ::testing::TestWithParam<int> {};

TEST_P(UnfinishedSaves, AreThoseOfTheAccumulationsBeginning) {
  for (const bool after_backward : {false, true}) {
    SCOPED_TRACE(after_backward);
    expect_goes_on_bit_equal(GetParam(), 2, /*noisy=*/false, {.at = 7, .after_backward = after_backward});
  }
}

TEST_P(UnfinishedSaves, HaveTheRandomNumbersOfThen) {
  expect_goes_on_bit_equal(GetParam(), 1, /*noisy=*/true, {.at = 5, .after_backward = true});
}

TEST_P(UnfinishedSaves, MayComeAfterALoadAndAfterZeroGrad) {
  const test::ScratchFolder folder;
  const std::string path = folder.path().string();
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SavingRun run(communicator, GetParam());
    Engine& engine = *run.parts.engine;
    const auto micro_batch = [&](SavingRun& of) {
      const auto batch = of.parts.loader->begin();
      of.parts.engine->backward(of.model->loss(batch->data));
      of.parts.engine->step();
      return of.parts.loader->indices();
    };
    micro_batch(run);
    engine.zero_grad();  // its sample is gone
    const std::vector<int64_t> next = micro_batch(run);
    engine.save_checkpoint(path, "dropped");
    SavingRun other(communicator, GetParam());
    ASSERT_TRUE(other.parts.engine->load_checkpoint(path, "dropped"));
    EXPECT_EQ(micro_batch(other), next);
    other.parts.engine->save_checkpoint(path, "again");
    SavingRun third(communicator, GetParam());
    ASSERT_TRUE(third.parts.engine->load_checkpoint(path, "again"));
    EXPECT_EQ(micro_batch(third), next);
  });
}

// As programs with torch's optimizers call it: in front of each backward of a step, when the batch is there already.
TEST_P(UnfinishedSaves, KnowTheBatchThatWasTakenBeforeZeroGrad) {
  const test::ScratchFolder folder;
  const std::string path = folder.path().string();
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SavingRun run(communicator, GetParam());
    const auto batch = run.parts.loader->begin();
    const std::vector<int64_t> first = run.parts.loader->indices();
    run.parts.engine->zero_grad();
    run.parts.engine->backward(run.model->loss(batch->data));
    run.parts.engine->step();
    run.parts.engine->save_checkpoint(path, "inside");
    SavingRun other(communicator, GetParam());
    ASSERT_TRUE(other.parts.engine->load_checkpoint(path, "inside"));
    other.parts.loader->begin();
    EXPECT_EQ(other.parts.loader->indices(), first);
  });
}

TEST_P(UnfinishedSaves, BeginAfterAStepThatFailed) {
  const test::ScratchFolder folder;
  const std::string path = folder.path().string();
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SavingRun run(communicator, GetParam());
    Engine& engine = *run.parts.engine;
    const auto micro_batch = [&](SavingRun& of, double factor) {
      const auto batch = of.parts.loader->begin();
      of.parts.engine->backward(of.model->loss(batch->data) * factor);
      of.parts.engine->step();
      return of.parts.loader->indices();
    };
    for (int i = 1; i < kAccumulation; ++i) micro_batch(run, 1.0);
    EXPECT_THROW(micro_batch(run, std::numeric_limits<double>::infinity()), NonFiniteError);
    const std::vector<int64_t> next = micro_batch(run, 1.0);
    engine.save_checkpoint(path, "inside");
    SavingRun other(communicator, GetParam());
    ASSERT_TRUE(other.parts.engine->load_checkpoint(path, "inside"));
    EXPECT_EQ(micro_batch(other, 1.0), next);
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, UnfinishedSaves, ::testing::Values(0, 1, 2, 3), stage_name);

}  // namespace
}  // namespace ds::engine
