// Pipelines whose layers are split over a tensor axis, against plain torch in one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "pipeline/schedule/schedule_file.h"
#include "tests/pipeline/split_job.h"
#include "tests/support/grid.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thrown.h"

namespace ds::pipeline {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int kWholeCurve = 50;  // steps

// Returns what rank 0 reports; all ranks report the same losses.
Curve train_split(const SplitJob& job) {
  Curve curve;
  std::vector<std::vector<double>> losses(static_cast<size_t>(job.world()));
  run_split(job, [&](engine::Engine& engine, comm::Communicator& world) {
    EXPECT_EQ(engine.mp_world_size(), job.tensor);
    EXPECT_EQ(engine.dp_world_size(), job.data);
    EXPECT_EQ(engine.pipe_parallel_size(), job.pipe);
    std::vector<double>& own = losses[static_cast<size_t>(world.rank())];
    for (int64_t step = 0; step < job.steps; ++step) {
      int64_t next = step * kBatchesOfAStep;
      own.push_back(engine.train_batch([&] { return text_of(next++, engine.communicator().rank()); }).item<double>());
      if (world.rank() == 0) curve.norms.push_back(engine.get_global_grad_norm().value_or(-1));
    }
    EXPECT_TRUE(engine.joined_operators().empty());
  });
  for (const auto& of_rank : losses) EXPECT_EQ(of_rank, losses[0]);
  curve.losses = losses[0];
  return curve;
}

void expect_same(const Curve& found, const Curve& wanted, double losses, double norms) {
  ASSERT_EQ(found.losses.size(), wanted.losses.size());
  for (size_t i = 0; i < wanted.losses.size(); ++i) {
    EXPECT_NEAR(found.losses[i], wanted.losses[i], losses) << "loss of step " << i;
    EXPECT_NEAR(found.norms[i], wanted.norms[i], norms * std::max(1.0, wanted.norms[i])) << "norm of step " << i;
  }
}

TEST(PipelineTensor, TrainsAsOneProcess) {
  const Curve longer = plain_curve({});
  ASSERT_LT(longer.losses.back(), longer.losses.front());
  // The third loss follows an update that used moments of the update before it; later steps repeat this.
  const int steps = test::whole_grid_wanted() ? 5 : 3;
  std::map<std::pair<int, bool>, Curve> wanted;
  for (const int data : {1, 2}) {
    for (const bool tied : {false, true}) {
      wanted[{data, tied}] = plain_curve({.data = data, .tied = tied, .steps = steps});
    }
  }
  const std::vector<std::string> schedules = {"gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zbv", "dualpipev"};
  for (const auto& [schedule, stage, data, tied, interval, sequence] :
       test::grid_sample(2, schedules, std::vector{0, 1, 2, 3}, std::vector{1, 2}, std::vector{false, true},
                         std::vector{0, 2}, std::vector{false, true})) {
    SCOPED_TRACE(testing::Message() << schedule << ", stage " << stage << ", data " << data << ", tied " << tied
                                    << ", recomputed " << interval << ", sequence " << sequence);
    const SplitJob job{.data = data,
                       .stage = stage,
                       .schedule = schedule,
                       .tied = tied,
                       .interval = interval,
                       .sequence = sequence,
                       .steps = steps};
    expect_same(train_split(job), wanted.at({data, tied}), 5e-6, 2e-5);
  }
}

// A grid's whole curves. One of them in every run of the tests: with no pair of values to cover the sample is one cell.
TEST(PipelineTensor, FiftyStepsAreThoseOfOneProcess) {
  std::map<std::pair<int, bool>, Curve> wanted;
  const std::vector<std::string> schedules = {"zbv", "gpipe", "1f1b", "interleaved", "zb_h1", "dualpipev"};
  for (const auto& [schedule, stage, data, tied, interval] : test::grid_sample(
           0, schedules, std::vector{1, 0, 2, 3}, std::vector{1, 2}, std::vector{true, false}, std::vector{2, 0})) {
    SCOPED_TRACE(testing::Message() << schedule << ", stage " << stage << ", data " << data << ", tied " << tied
                                    << ", recomputed " << interval);
    const SplitJob job{
        .data = data, .stage = stage, .schedule = schedule, .tied = tied, .interval = interval, .steps = kWholeCurve};
    Curve& plain = wanted[{data, tied}];
    if (plain.losses.empty()) plain = plain_curve(job);
    expect_same(train_split(job), plain, 5e-6, 2e-5);
  }
}

TEST(PipelineTensor, Float64AgreesToTheLastDigits) {
  for (const bool tied : {false, true}) {
    SplitJob job{.schedule = tied ? "zbv" : "1f1b",
                 .tied = tied,
                 .dtype = at::kDouble,
                 .steps = test::whole_grid_wanted() ? kWholeCurve : 5};
    const Curve wanted = plain_curve(job);
    for (const bool sequence : {false, true}) {
      job.sequence = sequence;
      expect_same(train_split(job), wanted, 1e-11, 1e-11);
    }
  }
}

TEST(PipelineTensor, FourStagesAndFourRanksOfAnAxisTrainAsOneProcess) {
  const int steps = test::whole_grid_wanted() ? kWholeCurve : 5;
  const Curve wanted = plain_curve({.tied = true, .steps = steps});
  expect_same(train_split({.pipe = 4, .stage = 1, .tied = true, .steps = steps}), wanted, 5e-6, 2e-5);
  expect_same(train_split({.tensor = 4, .stage = 3, .schedule = "zb_h1", .tied = true, .steps = steps}), wanted, 5e-6,
              2e-5);
}

// Each variant trains as the same config does on one rank of a layer.
TEST(PipelineTensor, VariantsTrainAsOnOneRank) {
  struct Variant {
    const char* name;
    int stage;
    nlohmann::json more;
    double losses, norms;
  };
  const std::vector<Variant> variants = {
      {"bf16", 1, {{"bf16", {{"enabled", true}}}}, 2e-2, 5e-2},
      {"fp16", 2, {{"fp16", {{"enabled", true}, {"initial_scale_power", 8}}}}, 5e-3, 1e-2},
      {"offload",
       3,
       {{"zero_optimization", {{"offload_optimizer", {{"device", "cpu"}}}, {"offload_param", {{"device", "cpu"}}}}}},
       5e-6,
       2e-5},
      {"hpz", 3, {{"zero_optimization", {{"zero_hpz_partition_size", 2}}}}, 5e-6, 2e-5},
      {"overlap", 2, {{"tensor_parallel", {{"tp_overlap_comm", true}}}}, 5e-6, 2e-5},
      {"lamb",
       1,
       {{"optimizer", {{"type", "Lamb"}, {"params", {{"lr", 1e-2}}}}}, {"zero_allow_untested_optimizer", true}},
       5e-6,
       2e-5},
  };
  for (const Variant& variant : variants) {
    SCOPED_TRACE(variant.name);
    // Lamb needs parts that lie alike, which those of the vocabulary do not.
    const bool uneven = std::string(variant.name) != "lamb";
    const SplitJob alone{.pipe = 1, .tensor = 1, .data = 2, .stage = variant.stage, .tied = true, .more = variant.more};
    SplitJob job = alone;
    job.pipe = job.tensor = 2;
    job.schedule = "zb_h1";
    job.cuts_vocabulary = uneven;
    expect_same(train_split(job), train_split(alone), variant.losses, variant.norms);
  }
}

TEST(PipelineTensor, CopiesAndNodesOfDataRanksTrainAsOneProcess) {
  struct Copies {
    const char* key;  // of four data-parallel ranks, two have a copy of the model state, or are a node
    int stage;
  };
  const std::vector<Copies> kinds = {
      {"mics_shard_size", 1}, {"mics_shard_size", 2}, {"mics_shard_size", 3}, {"zero_hpz_partition_size", 3}};
  const SplitJob plain{.data = 4, .tied = true, .steps = 3};
  const Curve wanted = plain_curve(plain);
  for (const auto& [copies, schedule] :
       test::grid_sample(1, kinds, std::vector<std::string>{"1f1b", "interleaved", "zb_h1", "zbv"})) {
    SCOPED_TRACE(testing::Message() << copies.key << " at stage " << copies.stage << ", " << schedule);
    SplitJob job = plain;
    job.stage = copies.stage;
    job.schedule = schedule;
    job.more = {{"zero_optimization", {{copies.key, 2}}}};
    expect_same(train_split(job), wanted, 5e-6, 2e-5);
  }
}

TEST(PipelineTensor, AScheduleOfOnesOwnTrainsAsOneProcess) {
  const test::ScratchFolder folder;
  const Curve wanted = plain_curve({.tied = true, .steps = 3});
  const auto expect_of_file = [&](const std::string& actions, int stage, bool sequence) {
    const std::string path = folder / "mine.csv";
    std::ofstream(path) << actions;
    SplitJob job{.stage = stage, .schedule = path, .tied = true, .sequence = sequence, .steps = 3};
    expect_same(train_split(job), wanted, 5e-6, 2e-5);
  };
  expect_of_file("0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3\n,1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3\n", 1, false);
  const Schedule two_chunks =
      make_schedule(ScheduleKind::kZbV, {.ranks = 2, .chunks = 2, .micro_batches = kBatchesOfAStep});
  expect_of_file(to_csv(two_chunks), 3, true);
}

TEST(PipelineTensor, AnOptimizerOfTheProgramTrainsAsOneProcess) {
  for (const auto& [stage, tied] : test::grid_sample(1, std::vector{0, 1, 2, 3}, std::vector{false, true})) {
    SCOPED_TRACE(testing::Message() << "stage " << stage << ", tied " << tied);
    SplitJob job{.stage = stage, .tied = tied, .steps = 3};
    const Curve wanted = plain_curve(job);
    job.more = {{"optimizer", {{"params", {{"lr", 1}}}}}};  // .make_optimizer takes its place
    job.make_optimizer = [](torch::nn::Module& model) {
      return std::make_shared<torch::optim::AdamW>(model.parameters(),
                                                   torch::optim::AdamWOptions(2e-3).weight_decay(0.01));
    };
    expect_same(train_split(job), wanted, 5e-6, 2e-5);
  }
}

// Returns the bytes that each rank sends in a job's second step: the shapes are agreed then.
std::vector<int64_t> bytes_of_a_step(const SplitJob& job) {
  std::vector<int64_t> bytes(static_cast<size_t>(job.world()));
  run_split(job, [&](engine::Engine& engine, comm::Communicator& world) {
    int64_t next = 0;
    const auto step = [&] { engine.train_batch([&] { return text_of(next++, engine.communicator().rank()); }); };
    step();
    engine.reset_comm_counters();
    step();
    bytes[static_cast<size_t>(world.rank())] = engine.comm_bytes_sent();
  });
  return bytes;
}

TEST(PipelineTensor, ReplicatedActivationsTravelInPiecesWhereTheConfigAsksForIt) {
  SplitJob job{.depth = 2};  // stages meet between layers, where x [2, 8, 16] is replicated
  const auto asked = [&](bool activations, bool gradients) {
    SplitJob result = job;
    result.more["pipeline"] = {{"pipe_partitioned", activations}, {"grad_partitioned", gradients}};
    return result;
  };
  expect_same(train_split(asked(true, true)), plain_curve(job), 5e-6, 2e-5);
  const std::vector<int64_t> whole = bytes_of_a_step(asked(false, false));
  EXPECT_EQ(bytes_of_a_step(job), whole) << "on one host nothing is cut by default";
  const std::vector<int64_t> cut = bytes_of_a_step(asked(true, false));
  const int64_t half = int64_t{kBatchesOfAStep} * 2 * 8 * kWidth * 4 / 2;
  for (size_t rank : {0, 1}) EXPECT_EQ(whole[rank] - cut[rank], half) << "half of x is sent, by rank " << rank;
  for (size_t rank : {2, 3}) EXPECT_EQ(cut[rank] - whole[rank], half) << "and gathered, by rank " << rank;
}

TEST(PipelineTensor, ThePlanSaysWhatStagesSend) {
  run_split({}, [](engine::Engine& engine, comm::Communicator& /*world*/) {
    const std::string table = to_table(engine.plan());
    EXPECT_THAT(table, AllOf(HasSubstr("pipeline 2 x data parallel 1 x tensor 2"), HasSubstr("replicated activations"),
                             HasSubstr("1/2 of the bytes from each rank, its own part")));
  });
}

TEST(PipelineTensor, EvaluatesAsPlainTorchWithFullLogits) {
  const SplitJob job{.schedule = "zbv", .tied = true};
  const auto plain = job.make();
  plain->build({});
  double wanted = 0;
  for (int64_t m = 0; m < 3; ++m) {
    const MicroBatch batch = text_of(m, 0);
    wanted += cross_entropy(plain->forward(batch.inputs[0]), batch.labels[0]).item<double>() / 3;
  }
  for (const char* schedule : {"1f1b", "zbv"}) {
    SplitJob one = job;
    one.schedule = schedule;
    run_split(one, [&](engine::Engine& engine, comm::Communicator& /*world*/) {
      int64_t next = 0;
      const auto source = [&] { return text_of(next++, 0); };
      const engine::Evaluation all =
          engine.eval_batch(source, {.num_micro_batches = 3, .return_logits = true, .broadcast_logits = true});
      EXPECT_NEAR(all.loss.item<double>(), wanted, 1e-6);
      ASSERT_EQ(all.logits.size(), 3U);
      const at::Tensor logits = all.logits[2].at(0);
      EXPECT_FALSE(parallel::is_split(logits));
      EXPECT_TRUE(torch::allclose(logits, plain->forward(text_of(2, 0).inputs[0]), 1e-5, 1e-6));
    });
  }
}

// `wrong` takes another micro-batch than its axis: all ranks are told which two differ, also those of stages between.
void expect_told(const SplitJob& job, int wrong, bool evaluates, const std::string& what) {
  run_split(job, [&](engine::Engine& engine, comm::Communicator& world) {
    int64_t next = world.rank() == wrong ? 100 : 0;
    const auto source = [&] { return text_of(next++, engine.communicator().rank()); };
    const auto step = [&] {
      if (evaluates) {
        engine.eval_batch(source);
      } else {
        engine.train_batch(source);
      }
    };
    EXPECT_THAT(test::thrown_by<UsageError>(step), AllOf(HasSubstr(what), HasSubstr("for micro-batch 0")))
        << "rank " << world.rank();
    EXPECT_EQ(engine.global_steps(), 0);
  });
}

TEST(PipelineTensor, RanksOfOneAxisThatTakeOtherBatchesAreTold) {
  expect_told({.pipe = 4}, 1, false, "ranks 0 and 1 of one tensor axis took different inputs");
  expect_told({.pipe = 4}, 7, false, "ranks 6 and 7 of one tensor axis took different labels");
  expect_told({.data = 2}, 3, true, "ranks 2 and 3 of one tensor axis took different inputs");
  expect_told({.schedule = "zbv"}, 1, false, "ranks 0 and 1 of one tensor axis took different inputs");
}

TEST(PipelineTensor, ARuleThatMatchesOnNoStageIsAnErrorOnAllRanks) {
  test::run_ranks(4, [](comm::Communicator& world) {
    const SplitJob job;
    std::vector<parallel::SplitRule> wrong = job.rules();
    wrong.push_back({"h\\.7\\..*", parallel::Style::kColumn});
    const auto start = [&] {
      engine::initialize(
          {.model = job.make(), .config = job.config(), .split = wrong, .communicator = test::borrowed(world)});
    };
    EXPECT_THAT(test::thrown_by<UsageError>(start), HasSubstr("matches no parameter")) << "rank " << world.rank();
  });
}

}  // namespace
}  // namespace ds::pipeline
