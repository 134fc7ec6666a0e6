// Checkpoints of pipelines with a tensor axis: saved in one layout of {pipe, tensor, data}, loaded in another.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/files/safetensors.h"
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
// A sample has neither axis, one of them, and both on each side, and four ranks of an axis on one side.
const std::vector<Axes> kSampledFrom = {{1, 1}, {2, 1}, {1, 4}, {2, 2}};
const std::vector<Axes> kSampledTo = {{1, 1}, {4, 1}, {1, 2}, {2, 2}};

// The steps before the save, and as many after it. Two make moments of two batches, and after a load the second loss is
// that of an update with them.
int half_of_the_steps() { return test::sample_wanted() ? 2 : 3; }

SplitJob job_of(Axes axes, int stage, bool tied) {
  return {.pipe = axes.pipe, .tensor = axes.tensor, .stage = stage, .tied = tied};
}

double train_step(engine::Engine& engine, int64_t step) {
  int64_t next = step * kBatchesOfAStep;
  return engine.train_batch([&] { return text_of(next++, engine.communicator().rank()); }).item<double>();
}

// The losses after the first steps of a run that is not interrupted.
std::vector<double> uninterrupted(bool tied) {
  std::vector<double> losses;
  run_split(job_of({}, 0, tied), [&](engine::Engine& engine, comm::Communicator&) {
    const int64_t half = half_of_the_steps();
    for (int64_t step = 0; step < 2 * half; ++step) {
      const double loss = train_step(engine, step);
      if (step >= half) losses.push_back(loss);
    }
  });
  return losses;
}

TEST(PipelineTensorCheckpoint, GoesOnInAnyOtherLayout) {
  std::map<bool, std::vector<double>> wanted;
  for (const bool tied : {false, true}) wanted[tied] = uninterrupted(tied);
  const bool sample = test::sample_wanted();
  const int64_t half = half_of_the_steps();
  for (const auto& [from, to, saved_stage, loaded_stage, tied] :
       test::grid_sample(2, sample ? kSampledFrom : kAxes, sample ? kSampledTo : kAxes, std::vector{0, 1, 2, 3},
                         std::vector{3, 2, 1, 0}, std::vector{false, true})) {
    SCOPED_TRACE(testing::Message() << "pipe " << from.pipe << " x tensor " << from.tensor << ", stage " << saved_stage
                                    << " into pipe " << to.pipe << " x tensor " << to.tensor << ", stage "
                                    << loaded_stage << ", tied " << tied);
    const test::ScratchFolder folder;
    run_split(job_of(from, saved_stage, tied), [&](engine::Engine& engine, comm::Communicator&) {
      for (int64_t step = 0; step < half; ++step) train_step(engine, step);
      engine.save_checkpoint(folder.path().string());
    });
    std::vector<double> losses;
    run_split(job_of(to, loaded_stage, tied), [&](engine::Engine& engine, comm::Communicator& world) {
      engine.load_checkpoint(folder.path().string());
      for (int64_t step = half; step < 2 * half; ++step) {
        const double loss = train_step(engine, step);
        if (world.rank() == 0) losses.push_back(loss);
      }
    });
    ASSERT_EQ(losses.size(), wanted.at(tied).size());
    for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], wanted.at(tied)[i], 5e-6) << "step " << i;
  }
}

TEST(PipelineTensorCheckpoint, FilesOfWeightsHaveAllStages) {
  for (const int stage : {1, 3}) {
    for (const bool tied : {false, true}) {
      SCOPED_TRACE(testing::Message() << "stage " << stage << ", tied " << tied);
      const test::ScratchFolder folder;
      SplitJob job = job_of({.pipe = 2, .tensor = 2}, stage, tied);
      job.more = {{"zero_optimization", {{"stage3_gather_16bit_weights_on_model_save", true}}}};
      run_split(job, [&](engine::Engine& engine, comm::Communicator& world) {
        engine.save_16bit_model(folder.path().string(), "model.safetensors");
        engine.save_weights((folder.path() / "some.safetensors").string(), {.names = {"h.*.wide.*"}});
        EXPECT_THAT([&] { engine.save_weights((folder.path() / "none").string(), {.names = {"nobody.*"}}); },
                    testing::ThrowsMessage<UsageError>(testing::HasSubstr("nobody")));
        engine.save_fp32_model(folder.path().string(), "model.pt");
        // Values that the later stage lacks, or that fit no stage: all ranks throw, and none waits for another.
        engine::StateDict given = engine.module_state_dict();
        if (world.rank() != 0) given.clear();
        for (const engine::StateDict& from : {given, engine::StateDict{{"nobody", torch::zeros({1})}}}) {
          EXPECT_ANY_THROW(engine.save_16bit_model(folder.path().string(), "never.safetensors", false, from));
        }
      });
      EXPECT_FALSE(std::filesystem::exists(folder.path() / "never.safetensors"));
      const auto whole = job.make();
      whole->build({});
      const SafetensorsFile model((folder.path() / "model.safetensors").string());
      const SafetensorsFile some((folder.path() / "some.safetensors").string());
      const auto plain = job.make();
      plain->build({});
      for (const at::Tensor& parameter : plain->parameters()) parameter.data().zero_();
      std::shared_ptr<torch::nn::Module> loaded = plain;
      torch::load(loaded, (folder.path() / "model.pt").string());
      const auto read = plain->named_parameters();
      size_t chosen = 0;
      for (const auto& item : whole->named_parameters()) {
        EXPECT_TRUE(model.tensor(item.key()).equal(item.value())) << item.key();
        EXPECT_TRUE(read[item.key()].equal(item.value())) << item.key();
        if (item.key().find(".wide.") == std::string::npos) continue;
        ++chosen;
        EXPECT_TRUE(some.tensor(item.key()).equal(item.value())) << item.key();
      }
      EXPECT_EQ(model.entries().size(), whole->named_parameters().size());
      EXPECT_EQ(some.entries().size(), chosen);
    }
  }
}

}  // namespace
}  // namespace ds::pipeline
