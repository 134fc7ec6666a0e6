// Loops of the program's own on GPUs, around fully_shard, DistributedDataParallel and SyncBatchNorm, against plain
// torch on the CPU with the joined batches.
#include "tests/gpu/nccl_ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "core/text.h"
#include "dsengine/distributed_data_parallel.h"
#include "dsengine/fully_shard.h"
#include "dsengine/sync_batch_norm.h"
#include "tests/loops/block_net.h"

namespace ds {
namespace {

constexpr int kSteps = 12;
constexpr double kTolerance = 1e-4;
constexpr double kHalfTolerance = 5e-3;  // of weights whose steps are 2e-3

test::MakeOptimizer adamw() { return test::optimizers()[2].second; }

test::NamedValues on_the_host(const test::NamedValues& values) {
  test::NamedValues copies;
  for (const auto& [name, value] : values) copies.emplace_back(name, value.cpu());
  return copies;
}

// Steps of a plain loop, each of a pass that run_alone(pass) runs, and of one whose gradients ranks exchange.
template <class RunAlone>
void train_on(test::BlockNet& model, torch::optim::Optimizer& optimizer, int rank, c10::Device device,
              const RunAlone& run_alone) {
  for (int step = 0; step < kSteps; ++step) {
    const auto pass = [&](int micro) { model->loss(test::batch_of(2 * step + micro, rank).to(device)).backward(); };
    run_alone([&] { pass(0); });
    pass(1);
    optimizer.step();
    optimizer.zero_grad();
  }
}

struct LoopCell {
  std::string name;
  int ranks;
  bool reshards = true;
  bool on_host = false;
  bool bfloat16 = false;
  bool copies = false;  // two ranks that shard, as often as there are
};

std::vector<LoopCell> loop_cells() {
  std::vector<LoopCell> cells;
  for (const int ranks : {1, 2}) {
    const auto add = [&](const char* name, LoopCell cell) {
      cell.name = cat(name, ranks);
      cell.ranks = ranks;
      cells.push_back(cell);
    };
    add("Reshard", {});
    add("Stay", {.reshards = false});
    add("SlicesOnTheHost", {.on_host = true});
    add("BFloat16", {.bfloat16 = true});
  }
  cells.push_back({.name = "Hybrid4", .ranks = 4, .copies = true});
  return cells;
}

class GpuFullyShard : public ::testing::TestWithParam<LoopCell> {};

INSTANTIATE_TEST_SUITE_P(Grid, GpuFullyShard, ::testing::ValuesIn(loop_cells()),
                         [](const auto& cell) { return cell.param.name; });

FullyShardOptions options_of(const LoopCell& cell, comm::Communicator& ranks, c10::Device device) {
  FullyShardOptions options;
  options.reshard_after_forward = cell.reshards;
  options.device = device.str();
  if (cell.on_host) options.offload_policy = CPUOffloadPolicy{};
  if (cell.bfloat16) options.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  if (cell.copies) {
    options.mesh = comm::init_device_mesh(test::borrowed(ranks), {2, 2}, {"replicate", "shard"}, device);
  } else {
    options.process_group = test::borrowed(ranks);
  }
  return options;
}

TEST_P(GpuFullyShard, TrainsAsPlainTorchOnTheCpu) {
  const LoopCell& cell = GetParam();
  if (const std::string why = cell.ranks > 1 ? test::missing_gpus(cell.ranks) : ""; !why.empty()) GTEST_SKIP() << why;
  const test::NamedValues expected = test::train_plain(cell.ranks, kSteps, adamw(), /*micro_batches=*/2);
  test::on_devices(cell.ranks, [&](comm::Communicator& ranks, c10::Device device) {
    test::BlockNet model;
    const FullyShardOptions options = options_of(cell, ranks, device);
    for (test::Block& block : model->blocks) fully_shard(block, options);
    const auto sharded = fully_shard(model, options);
    const auto optimizer = adamw()(sharded->parameters());
    EXPECT_EQ(sharded->parameters().front().device(), cell.on_host ? c10::Device(at::kCPU) : device);
    train_on(model, *optimizer, ranks.rank(), device, [&](const auto& pass) {
      sharded->set_requires_gradient_sync(false);
      pass();
      sharded->set_requires_gradient_sync(true);
    });
    EXPECT_LT(test::largest_difference(on_the_host(sharded->full_state_dict()), expected),
              cell.bfloat16 ? kHalfTolerance : kTolerance);
  });
}

class GpuDataParallel : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, GpuDataParallel, ::testing::Values(1, 2, 3));

TEST_P(GpuDataParallel, TrainsAsPlainTorchOnTheCpu) {
  const int world = GetParam();
  if (const std::string why = world > 1 ? test::missing_gpus(world) : ""; !why.empty()) GTEST_SKIP() << why;
  const test::NamedValues expected = test::train_plain(world, kSteps, adamw(), /*micro_batches=*/2);
  test::on_devices(world, [&](comm::Communicator& ranks, c10::Device device) {
    test::BlockNet model;
    model->to(device);
    DistributedDataParallel ddp(
        model, {.process_group = test::borrowed(ranks), .bucket_cap_mb = 3e-4, .first_bucket_mb = 1e-4});
    const auto optimizer = adamw()(model->parameters());
    train_on(model, *optimizer, ranks.rank(), device, [&](const auto& pass) {
      const auto alone = ddp.no_sync();
      pass();
    });
    EXPECT_LT(test::largest_difference(on_the_host(test::named_values(*model)), expected), kTolerance);
  });
}

// Ranks with batches of 5 and 3 samples.
TEST(GpuSyncBatchNorm, IsThatOfTheJoinedBatchOnTheCpu) {
  if (const std::string why = test::missing_gpus(2); !why.empty()) GTEST_SKIP() << why;
  const at::Tensor values = torch::cos(torch::arange(8 * 3 * 4, torch::kFloat) * 0.37).view({8, 3, 4});
  torch::nn::BatchNorm1d whole(3);
  const at::Tensor joined = values.clone().requires_grad_(true);
  const at::Tensor weights = torch::sin(torch::arange(8 * 3 * 4, torch::kFloat)).view({8, 3, 4});
  const at::Tensor expected = whole->forward(joined);
  (expected * weights).sum().backward();
  test::on_gpus(2, [&](comm::Communicator& ranks, c10::Device device) {
    torch::nn::BatchNorm1d norm(3);
    norm->to(device);
    convert_sync_batchnorm(*norm, ranks);
    const int64_t begin = ranks.rank() == 0 ? 0 : 5;
    const int64_t count = ranks.rank() == 0 ? 5 : 3;
    const at::Tensor own = values.narrow(0, begin, count).to(device).requires_grad_(true);
    const at::Tensor found = norm->forward(own);
    (found * weights.narrow(0, begin, count).to(device)).sum().backward();
    EXPECT_TRUE(torch::allclose(found.detach().cpu(), expected.detach().narrow(0, begin, count), 1e-4, 1e-5));
    EXPECT_TRUE(torch::allclose(own.grad().cpu(), joined.grad().narrow(0, begin, count), 1e-3, 1e-5));
    EXPECT_TRUE(torch::allclose(norm->running_mean.cpu(), whole->running_mean, 1e-4, 1e-6));
    EXPECT_TRUE(torch::allclose(norm->running_var.cpu(), whole->running_var, 1e-4, 1e-6));
  });
}

}  // namespace
}  // namespace ds
