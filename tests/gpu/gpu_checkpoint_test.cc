// Checkpoints that are saved on one device and go on on another.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <tuple>
#include <vector>

#include "comm/shared_memory/thread_group.h"
#include "tests/gpu/device_run.h"
#include "tests/model/checkpoint/checkpoint_run.h"
#include "tests/support/scratch_folder.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;

constexpr int64_t kSavedStep = 4;
constexpr int64_t kLastStep = 10;

// An engine on a device, with its model and a group of one rank.
class CarriedRun {
 public:
  CarriedRun(at::Device device, const ordered_json& config)
      : engine(initialize(
                   {.model = model.ptr(), .config = config, .communicator = borrowed(*ranks_), .device = device.str()})
                   .engine) {}

  // Losses of the steps up to `step`.
  std::vector<double> train_to(int64_t step) {
    std::vector<double> losses;
    while (engine->global_steps() < step) {
      const at::Tensor loss = model->loss(rows_of(engine->global_steps(), 0, 1).to(engine->device()));
      engine->backward(loss);
      engine->step();
      losses.push_back(loss.item<double>());
    }
    return losses;
  }
  State weights() { return copy_of(engine->fp32_state_dict()); }

 private:
  std::shared_ptr<comm::Communicator> ranks_ = comm::ThreadGroup(1).communicator(0);

 public:
  CarriedNet model;
  std::shared_ptr<Engine> engine;
};

struct CheckpointCell {
  std::string name;
  int stage;
  std::string precision;
  ordered_json offload = {};
};

std::vector<CheckpointCell> checkpoint_cells() {
  return {{"Stage0", 0, "fp32"},     {"Stage2", 2, "fp32"},     {"Stage3", 3, "fp32"},
          {"Stage2bf16", 2, "bf16"}, {"Stage3bf16", 3, "bf16"}, {"OptimizerOnTheHost", 2, "bf16", on_host()}};
}

class GpuCheckpoint : public ::testing::TestWithParam<CheckpointCell> {
 protected:
  static ordered_json config() {
    ordered_json config = carried_config(GetParam().stage, 1);
    if (GetParam().precision != "fp32") config[GetParam().precision]["enabled"] = true;
    return with_offload(config, GetParam().offload);
  }
  // Saves on one device, goes on on the other; what follows must be as in a run on the CPU without a break.
  static void expect_carried(at::Device from, at::Device to) {
    SCOPED_TRACE(cat(from.str(), " to ", to.str()));
    const test::ScratchFolder folder;
    CarriedRun first(from, config());
    first.train_to(kSavedStep);
    first.engine->save_checkpoint(folder.path().string());
    CarriedRun second(to, config());
    second.engine->load_checkpoint(folder.path().string());
    EXPECT_EQ(second.engine->global_steps(), kSavedStep);
    EXPECT_EQ(largest_difference(second.weights(), first.weights()), 0.0) << "a file has no rounding";
    CarriedRun whole(at::kCPU, config());
    whole.train_to(kSavedStep);
    const double tolerance = GetParam().precision == "fp32" ? 1e-4 : 0.05;
    expect_same_losses(second.train_to(kLastStep), whole.train_to(kLastStep), tolerance);
  }
};

INSTANTIATE_TEST_SUITE_P(Stages, GpuCheckpoint, ::testing::ValuesIn(checkpoint_cells()),
                         [](const auto& cell) { return cell.param.name; });

TEST_P(GpuCheckpoint, FromTheGpuGoesOnOnTheCpu) { expect_carried(test::tested_device(), at::kCPU); }
TEST_P(GpuCheckpoint, FromTheCpuGoesOnOnTheGpu) { expect_carried(at::kCPU, test::tested_device()); }
TEST_P(GpuCheckpoint, FromTheGpuGoesOnOnTheGpu) { expect_carried(test::tested_device(), test::tested_device()); }

TEST_P(GpuCheckpoint, SavedBesideTrainingHoldsTheStepItWasAskedFor) {
  const test::ScratchFolder folder;
  CarriedRun run(test::tested_device(), config());
  run.train_to(kSavedStep);
  const State saved = run.weights();
  run.engine->save_checkpoint(folder.path().string(), "", {.asynchronous = true});
  run.train_to(kLastStep);
  run.engine->wait_for_checkpoint();
  run.engine->load_checkpoint(folder.path().string());
  EXPECT_EQ(run.engine->global_steps(), kSavedStep);
  EXPECT_EQ(largest_difference(run.weights(), saved), 0.0);
}

}  // namespace
}  // namespace ds::engine
