// Tensor axes whose ranks are on GPUs of their own, joined by NCCL, with the same training on the CPU; and what the
// host waits for.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <barrier>
#include <functional>
#include <string>
#include <vector>

#include "core/check.h"
#include "dsengine/activation_checkpoint.h"
#include "tests/engine/tensor_parallel/split_training.h"
#include "tests/gpu/host_waits.h"
#include "tests/gpu/nccl_ranks.h"
#include "tests/gpu/tested_device.h"

namespace ds::engine {
namespace {

using test::on_gpus;
using test::Waits;

struct TensorCell {
  std::string name;
  GptRun run;
  double tolerance = 1e-4;  // of losses; 5 % in 16 bits
};

TensorCell stage_cell(int stage, const std::string& precision, int tensor, int data, bool sequences) {
  TensorCell cell{.name = cat("Stage", stage, precision, "Tensor", tensor, "Data", data, sequences ? "Sequences" : ""),
                  .run = {.tensor = tensor, .data = data, .stage = stage, .steps = 6}};
  if (precision != "fp32") cell.run.more[precision]["enabled"] = true;
  if (precision == "fp16") cell.run.more["fp16"]["initial_scale_power"] = 8;
  if (precision != "fp32") cell.tolerance = 0.05;
  cell.run.more["tensor_parallel"] = {{"sequence_parallel", sequences}, {"tp_overlap_comm", sequences}};
  return cell;
}

std::vector<TensorCell> tensor_cells() {
  std::vector<TensorCell> cells;
  for (const char* precision : {"fp32", "bf16"}) {
    for (const int stage : {0, 1, 2, 3}) cells.push_back(stage_cell(stage, precision, 2, 1, stage % 2 == 1));
  }
  cells.push_back(stage_cell(2, "fp16", 2, 2, false));
  cells.push_back(stage_cell(3, "bf16", 2, 2, false));
  cells.push_back(stage_cell(3, "fp32", 4, 1, true));
  TensorCell offloaded = stage_cell(2, "bf16", 2, 1, false);
  offloaded.name += "OptimizerOnTheHost";
  offloaded.run.more["zero_optimization"]["offload_optimizer"]["device"] = "cpu";
  cells.push_back(offloaded);
  for (const bool sequences : {false, true}) {
    TensorCell regions = stage_cell(3, "fp32", 2, 1, sequences);
    regions.name += "Regions";
    regions.run.model.activation_checkpointing = true;
    regions.run.more["activation_checkpointing"] = {{"partition_activations", true}, {"cpu_checkpointing", true}};
    cells.push_back(regions);
  }
  return cells;
}

class GpuTensorAxis : public ::testing::TestWithParam<TensorCell> {};

INSTANTIATE_TEST_SUITE_P(Grid, GpuTensorAxis, ::testing::ValuesIn(tensor_cells()),
                         [](const auto& cell) { return cell.param.name; });

TEST_P(GpuTensorAxis, DoesWhatTheCpuDoes) {
  const TensorCell& cell = GetParam();
  GptRun plain = cell.run;
  if (plain.more.contains("zero_optimization")) plain.more["zero_optimization"].erase("offload_optimizer");
  const Curve expected = of_one_rank(plain);
  on_gpus(cell.run.world(), [&](comm::Communicator& ranks, at::Device device) {
    GptRun run = cell.run;
    run.device = device.str();
    const auto net = run.make();
    const auto engine = run.start(ranks, net).engine;
    EXPECT_EQ(engine->device(), device);
    const Curve found = run.train(*engine, *net);
    ASSERT_EQ(found.losses.size(), expected.losses.size());
    for (size_t i = 0; i < found.losses.size(); ++i) {
      EXPECT_NEAR(found.losses[i], expected.losses[i], cell.tolerance * (1 + expected.losses[i])) << "step " << i;
    }
    EXPECT_LT(found.losses.back(), found.losses.front());
    EXPECT_TRUE(engine->joined_operators().empty());
  });
}

// What ranks of an axis do differently is found on the device, and told one step later: at the next step(). On another
// axis too, where there is one.
void expect_told(const GptRun& run, const std::string& said,
                 const std::function<void(GptBatch& batch, double& factor)>& apart) {
  on_gpus(run.world(), [&](comm::Communicator& ranks, at::Device device) {
    GptRun own = run;
    own.device = device.str();
    const auto net = own.make();
    const auto engine = own.start(ranks, net).engine;
    const auto step = [&](bool parts) {
      GptBatch batch = gpt_batch(0, engine->communicator().rank(), own.model);
      double factor = 1;
      if (parts) apart(batch, factor);
      batch = batch.to(device);
      engine->backward(net->forward(batch.tokens, batch.targets) * factor);
      engine->step();
    };
    step(false);
    EXPECT_NO_THROW(step(ranks.rank() == 1));
    const bool own_axis = ranks.rank() < 2;
    EXPECT_THAT([&] { step(false); }, ::testing::ThrowsMessage<UsageError>(::testing::HasSubstr(
                                          own_axis ? said : "ranks of another tensor axis do not agree")));
  });
}

TEST(GpuTensorAgreement, AnotherBatchOrLossIsAnErrorOneStepLater) {
  if (const std::string why = test::missing_gpus(4); !why.empty()) GTEST_SKIP() << why;
  for (const int data : {1, 2}) {
    GptRun run{.tensor = 2, .data = data, .stage = 1};
    run.more["bf16"]["enabled"] = true;
    expect_told(run, "ranks 0 and 1 of one tensor axis got different batches",
                [](GptBatch& batch, double&) { batch.targets = batch.targets.flip(0); });
    expect_told(run, "ranks 0 and 1 of one tensor axis have different losses",
                [](GptBatch&, double& factor) { factor = 1.5; });
  }
}

// Of steps in which nobody asks for a loss, after some that are not counted.
Waits waits_of_steps(GptRun run, int steps) {
  std::barrier all(run.world());
  Waits waits;
  on_gpus(run.world(), [&](comm::Communicator& ranks, at::Device device) {
    GptRun own = run;
    own.device = device.str();
    own.more["steps_per_print"] = 1000;
    const auto net = own.make();
    const auto engine = own.start(ranks, net).engine;
    const GptBatch batch = gpt_batch(0, 0, own.model).to(device);
    const auto make_steps = [&](int count) {
      for (int step = 0; step < count; ++step) {
        engine->backward(net->forward(batch.tokens, batch.targets));
        engine->step();
      }
    };
    make_steps(3);
    test::take_waits(all, ranks.rank() == 0, waits);
    make_steps(steps);
    test::take_waits(all, ranks.rank() == 0, waits);
    at::ones({1}, at::TensorOptions(device)).item<float>();
    all.arrive_and_wait();
    if (ranks.rank() == 0) EXPECT_NE(test::text_of(test::take_waits()), "") << "who asks for a number waits for it";
  });
  return waits;
}

class GpuTensorWaits : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Stages, GpuTensorWaits, ::testing::Values(0, 3));

TEST_P(GpuTensorWaits, NothingInAStepLetsTheHostWait) {
  if (!test::device_is_simulated()) GTEST_SKIP() << "waits of the host are counted by the simulated GPU";
  constexpr int kSteps = 5;
  GptRun run{.tensor = 2, .stage = GetParam()};
  run.more["bf16"]["enabled"] = true;
  Waits waits = waits_of_steps(run, kSteps);
  EXPECT_EQ(test::text_of(waits), "");
}

}  // namespace
}  // namespace ds::engine
