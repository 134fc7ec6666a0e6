// Checkpoints of pipelines with a tensor axis: saved in one layout of {pipe, tensor, data}, loaded in another.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/pipeline/split_job.h"
#include "tests/support/grid.h"
#include "tests/support/scratch_folder.h"

namespace ds::pipeline {
namespace {

struct Axes {
  int pipe = 1;
  int tensor = 1;
};

const std::vector<Axes> kAxes = {{1, 1}, {2, 1}, {1, 2}, {2, 2}, {4, 1}, {1, 4}};
constexpr int kBefore = 3;
constexpr int kAfter = 3;

SplitJob job_of(Axes axes, int stage, bool tied) {
  return {.pipe = axes.pipe, .tensor = axes.tensor, .stage = stage, .tied = tied};
}

double train_step(engine::Engine& engine, int64_t step) {
  int64_t next = step * kMicroBatches;
  return engine.train_batch([&] { return text_of(next++, engine.communicator().rank()); }).item<double>();
}

// The losses after the first steps of a run that is not interrupted.
std::vector<double> uninterrupted(bool tied) {
  std::vector<double> losses;
  run_split(job_of({}, 0, tied), [&](engine::Engine& engine, comm::Communicator&) {
    for (int64_t step = 0; step < kBefore + kAfter; ++step) {
      const double loss = train_step(engine, step);
      if (step >= kBefore) losses.push_back(loss);
    }
  });
  return losses;
}

TEST(PipelineTensorCheckpoint, GoesOnInAnyOtherLayout) {
  std::map<bool, std::vector<double>> wanted;
  for (const bool tied : {false, true}) wanted[tied] = uninterrupted(tied);
  for (const auto& [from, to, saved_stage, loaded_stage, tied] :
       test::grid_sample(2, kAxes, kAxes, std::vector{0, 1, 2, 3}, std::vector{3, 2, 1, 0}, std::vector{false, true})) {
    SCOPED_TRACE(testing::Message() << "pipe " << from.pipe << " x tensor " << from.tensor << ", stage " << saved_stage
                                    << " into pipe " << to.pipe << " x tensor " << to.tensor << ", stage "
                                    << loaded_stage << ", tied " << tied);
    const test::ScratchFolder folder;
    run_split(job_of(from, saved_stage, tied), [&](engine::Engine& engine, comm::Communicator&) {
      for (int64_t step = 0; step < kBefore; ++step) train_step(engine, step);
      engine.save_checkpoint(folder.path().string());
    });
    std::vector<double> losses;
    run_split(job_of(to, loaded_stage, tied), [&](engine::Engine& engine, comm::Communicator& world) {
      engine.load_checkpoint(folder.path().string());
      for (int64_t step = kBefore; step < kBefore + kAfter; ++step) {
        const double loss = train_step(engine, step);
        if (world.rank() == 0) losses.push_back(loss);
      }
    });
    ASSERT_EQ(losses.size(), wanted.at(tied).size());
    for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], wanted.at(tied)[i], 5e-6) << "step " << i;
  }
}

}  // namespace
}  // namespace ds::pipeline
