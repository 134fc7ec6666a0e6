// The section flops_profiler: operations of one step, at every stage, resumed, in a pipeline.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/log.h"
#include "dsengine/errors.h"
#include "dsengine/profiling.h"
#include "tests/model/small_run.h"
#include "tests/pipeline/pipeline_job.h"
#include "tests/support/file_text.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using profiling::FlopsProfile;
using profiling::ModuleFlops;
using profiling::profile_flops;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

constexpr int64_t kRows = 4;                               // of a micro-batch of the small network
constexpr int64_t kProducts = kRows * (6 * 11 + 11 * 3);   // its two layers
constexpr int64_t kGradients = kRows * (6 * 11 + 2 * 33);  // the input has none

nlohmann::ordered_json profiled_config(int stage, int profile_step = 1) {
  nlohmann::ordered_json config = small_config(stage, /*accumulation=*/2);
  config["flops_profiler"] = {{"enabled", true}, {"profile_step", profile_step}};
  return config;
}

void make_counted_steps(Engine& engine, SmallNet& model, int steps) {
  for (int64_t micro = 0; micro < 2 * steps; ++micro) {
    engine.backward(model->loss(sample(micro, engine.global_rank())));
    engine.step();
  }
}

class FlopsOfAStep : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stages, FlopsOfAStep, ::testing::Values(0, 1, 2, 3));

// What an engine adds, gathers, casts and reduces is no work of the model.
TEST_P(FlopsOfAStep, IsThatOfOneMicroBatch) {
  test::run_ranks(2, [](comm::Communicator& ranks) {
    SmallNet model;
    const auto engine = start(model.ptr(), profiled_config(GetParam()), ranks).engine;
    make_counted_steps(*engine, model, 1);
    EXPECT_FALSE(flops_profile(*engine)) << "profile_step 1 is the second step";
    make_counted_steps(*engine, model, 1);
    ASSERT_TRUE(flops_profile(*engine));
    const FlopsProfile profile = *flops_profile(*engine);
    const ModuleFlops& all = profile.modules.front();
    EXPECT_EQ(all.macs, kProducts);
    EXPECT_EQ(all.backward_macs, kGradients);
    EXPECT_EQ(all.parameters, 6 * 11 + 11 + 2 * 11 + 11 * 3 + 3);
    EXPECT_THAT(profile.unknown_operators, ::testing::IsEmpty());
    std::map<std::string, int64_t> macs;
    for (const ModuleFlops& module : profile.modules) macs[module.name] = module.macs;
    EXPECT_EQ(macs, (std::map<std::string, int64_t>{
                        {"", kProducts}, {"first", kRows * 66}, {"norm", 0}, {"last", kRows * 33}}));
    EXPECT_THAT(profile.text,
                AllOf(HasSubstr("flops profile of step 2"), ContainsRegex("data parallel size: +2\n"),
                      ContainsRegex("batch size per GPU: +4\n"), ContainsRegex("params of model: +135\n"),
                      ContainsRegex("fwd latency: +[0-9.]+ [mu]?s\n"), ContainsRegex("samples/second: +[0-9.]+\n")));
    make_counted_steps(*engine, model, 2);
    EXPECT_EQ(flops_profile(*engine)->text, profile.text) << "once in a run";
  });
}

TEST(FlopsReport, TrainsAsWithoutIt) {
  test::run_ranks(2, [](comm::Communicator& ranks) {
    for (const int stage : {0, 3}) {
      SmallNet plain;
      SmallNet profiled;
      const auto without = start(plain.ptr(), small_config(stage, 2), ranks).engine;
      const auto with = start(profiled.ptr(), profiled_config(stage), ranks).engine;
      EXPECT_EQ(largest_difference(train(*without, plain, 3), train(*with, profiled, 3)), 0);
    }
  });
}

TEST(FlopsReport, TheFirstStepAndOneThatBeginsAnew) {
  test::run_ranks(1, [](comm::Communicator& ranks) {
    SmallNet model;
    const auto engine = start(model.ptr(), profiled_config(0, /*profile_step=*/0), ranks).engine;
    engine->backward(model->loss(sample(0, 0)));
    engine->step();
    engine->zero_grad();  // drops half of the step
    make_counted_steps(*engine, model, 1);
    ASSERT_TRUE(flops_profile(*engine));
    EXPECT_EQ(flops_profile(*engine)->modules.front().macs, kProducts);
  });
}

// A run that is resumed before the profiled step comes to it; one that is past it does not.
TEST(FlopsReport, OfARunThatIsResumed) {
  const test::ScratchFolder scratch;
  test::run_ranks(1, [&](comm::Communicator& ranks) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(0, 2), ranks).engine;
    make_counted_steps(*engine, model, 3);
    engine->save_checkpoint(scratch.path().string(), "three");
    for (const int step : {1, 3, 4}) {
      SmallNet again;
      const auto resumed = start(again.ptr(), profiled_config(0, step), ranks).engine;
      resumed->load_checkpoint(scratch.path().string());
      make_counted_steps(*resumed, again, 2);
      ASSERT_EQ(flops_profile(*resumed).has_value(), step >= 3) << step;
      if (step >= 3) EXPECT_EQ(flops_profile(*resumed)->modules.front().macs, kProducts) << step;
    }
  });
}

TEST(FlopsReport, ToAFile) {
  const test::ScratchFolder scratch;
  const std::string path = scratch / "profile.txt";
  test::run_ranks(2, [&](comm::Communicator& ranks) {
    nlohmann::ordered_json config = profiled_config(1, 0);
    config["flops_profiler"]["output_file"] = path;
    config["flops_profiler"]["detailed"] = false;
    SmallNet model;
    const auto engine = start(model.ptr(), config, ranks).engine;
    make_counted_steps(*engine, model, 1);
    ranks.barrier();
    if (ranks.rank() == 0) EXPECT_EQ(test::file_text(path), flops_profile(*engine)->text);
    EXPECT_THAT(flops_profile(*engine)->text, Not(HasSubstr("each module")));
  });
}

TEST(FlopsReport, Mistakes) {
  test::run_ranks(1, [](comm::Communicator& ranks) {
    SmallNet model;
    nlohmann::ordered_json config = profiled_config(0);
    config["flops_profiler"]["output_file"] = "/no/such/folder/profile.txt";
    EXPECT_THAT([&] { start(model.ptr(), config, ranks); },
                ThrowsMessage<IoError>(AllOf(HasSubstr("flops_profiler.output_file"), HasSubstr("/no/such/folder"))));
    config = profiled_config(0);
    config["flops_profiler"]["module_depth"] = -2;
    EXPECT_THAT([&] { start(model.ptr(), config, ranks); },
                ThrowsMessage<ConfigError>(HasSubstr("flops_profiler.module_depth")));
    const auto engine = start(model.ptr(), small_config(0, 1), ranks).engine;
    EXPECT_THAT([&] { flops_profile(*engine); }, ThrowsMessage<UsageError>(HasSubstr("flops_profiler")));
    EXPECT_THROW(profile_flops(*model, nullptr), UsageError);
  });
}

TEST(FlopsReport, ANegativeStepIsNeverProfiled) {
  test::run_ranks(1, [](comm::Communicator& ranks) {
    SmallNet model;
    const auto engine = start(model.ptr(), profiled_config(0, /*profile_step=*/-1), ranks).engine;
    make_counted_steps(*engine, model, 2);
    EXPECT_FALSE(flops_profile(*engine));
    EXPECT_THAT(config::parse(profiled_config(0, -1)).warnings, ::testing::Contains(HasSubstr("no step is profiled")));
  });
}

// Of the whole model as the sum of its parts; those of a tensor axis: tests/engine/tensor_parallel/flops_test.cc.
TEST(FlopsReport, PartsOfAPipelineAddUp) {
  std::vector<FlopsProfile> profiles(2);
  std::vector<FlopsProfile> whole(1);
  const auto profile_of = [](int stages, std::vector<FlopsProfile>& into) {
    nlohmann::json config = pipeline::config_of(stages, "1f1b", 1);
    config["flops_profiler"] = {{"enabled", true}};
    pipeline::run({.ranks = stages, .config = config, .tied = false}, [&](pipeline::Rank& rank) {
      for (int step = 0; step < 2; ++step) rank.train_step(step);
      into[static_cast<size_t>(rank.world_rank)] = flops_profile(rank.engine).value();
    });
  };
  profile_of(2, profiles);
  profile_of(1, whole);
  const ModuleFlops& first = profiles[0].modules.front();
  const ModuleFlops& last = profiles[1].modules.front();
  const ModuleFlops& all = whole[0].modules.front();
  EXPECT_GT(first.macs, 0);
  EXPECT_EQ(first.macs + last.macs, all.macs);
  EXPECT_EQ(first.backward_macs + last.backward_macs, all.backward_macs);
  EXPECT_EQ(first.parameters + last.parameters, all.parameters);
  EXPECT_THAT(profiles[0].text,
              AllOf(ContainsRegex("model parallel size: +2\n"), HasSubstr("fwd and bwd latency of the schedule")));
}

}  // namespace
}  // namespace ds::engine
