// What meets both wrappers: BatchNorm layers that wait for ranks, and a loss scaler.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <memory>
#include <vector>

#include "dsengine/distributed_data_parallel.h"
#include "dsengine/fully_shard.h"
#include "dsengine/grad_scaler.h"
#include "dsengine/sync_batch_norm.h"
#include "tests/loops/block_net.h"
#include "tests/support/thread_ranks.h"

namespace ds {
namespace {

constexpr int kNormRanks = 2;
constexpr int kNormSteps = 10;

struct NormNetImpl : torch::nn::Module {
  NormNetImpl() {
    first = register_module("first", torch::nn::Linear(5, 8));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    last = register_module("last", torch::nn::Linear(8, 3));
    const torch::NoGradGuard no_grad;
    int64_t index = 0;
    for (at::Tensor& parameter : parameters()) {
      const at::Tensor steps = torch::arange(parameter.numel(), torch::kDouble) * 0.7 + static_cast<double>(index++);
      parameter.copy_((torch::sin(steps) * 0.4).view(parameter.sizes()));
    }
  }
  at::Tensor loss(const at::Tensor& x) {
    return (last(torch::relu(norm(first(x)))) - x.narrow(1, 0, 3).sin()).pow(2).mean();
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(NormNet);

at::Tensor norm_batch_of(int step, int rank) {
  const at::Tensor steps = torch::arange(30, torch::kDouble) * 1.3 + static_cast<double>(17 * step + 5 * rank);
  return torch::cos(steps).view({6, 5}).to(torch::kFloat);
}

// Losses, running mean and variance of one process with the joined batches.
struct JoinedRun {
  std::vector<double> losses;
  at::Tensor mean, variance;
};

JoinedRun train_joined() {
  NormNet net;
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  JoinedRun result;
  for (int step = 0; step < kNormSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = net->loss(torch::cat({norm_batch_of(step, 0), norm_batch_of(step, 1)}));
    loss.backward();
    optimizer.step();
    result.losses.push_back(loss.item<double>());
  }
  result.mean = net->norm->running_mean.clone();
  result.variance = net->norm->running_var.clone();
  return result;
}

void expect_joined(NormNet& net, comm::Communicator& ranks, torch::optim::Optimizer& optimizer) {
  const JoinedRun expected = train_joined();
  for (int step = 0; step < kNormSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = net->loss(norm_batch_of(step, ranks.rank()));
    loss.backward();
    optimizer.step();
    at::Tensor mean = loss.detach().to(at::kDouble).view({1}) / kNormRanks;
    ranks.all_reduce(mean).wait();
    EXPECT_NEAR(mean.item<double>(), expected.losses[static_cast<size_t>(step)], 5e-6) << "step " << step;
  }
  EXPECT_TRUE(at::allclose(net->norm->running_mean, expected.mean, 0, 1e-6));
  EXPECT_TRUE(at::allclose(net->norm->running_var, expected.variance, 0, 1e-6));
}

TEST(NormsOfWrappers, ReplicasNormalizeTheJoinedBatch) {
  test::run_ranks(kNormRanks, [](comm::Communicator& ranks) {
    NormNet net;
    convert_sync_batchnorm(*net);
    const DistributedDataParallel ddp(net, {.process_group = test::borrowed(ranks)});
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    expect_joined(net, ranks, optimizer);
  });
}

TEST(NormsOfWrappers, ShardsNormalizeTheJoinedBatch) {
  test::run_ranks(kNormRanks, [](comm::Communicator& ranks) {
    NormNet net;
    convert_sync_batchnorm(*net);
    FullyShardOptions options;
    options.process_group = test::borrowed(ranks);
    const auto sharded = fully_shard(net, options);
    torch::optim::SGD optimizer(sharded->parameters(), 0.1);
    expect_joined(net, ranks, optimizer);
  });
}

// The unit's own ranks for the layer end when it becomes part of the model.
TEST(NormsOfWrappers, AUnitOfShardsNormalizesTheJoinedBatch) {
  test::run_ranks(kNormRanks, [](comm::Communicator& ranks) {
    NormNet net;
    convert_sync_batchnorm(*net);
    FullyShardOptions options;
    options.process_group = test::borrowed(ranks);
    fully_shard(net->norm, options);
    const auto sharded = fully_shard(net, options);
    torch::optim::SGD optimizer(sharded->parameters(), 0.1);
    expect_joined(net, ranks, optimizer);
  });
}

TEST(NormsOfWrappers, AWrapperThatIsMadeAgainNormalizesTheJoinedBatch) {
  test::run_ranks(kNormRanks, [](comm::Communicator& ranks) {
    NormNet net;
    convert_sync_batchnorm(*net);
    { const DistributedDataParallel first(net, {.process_group = test::borrowed(ranks)}); }
    const DistributedDataParallel again(net, {.process_group = test::borrowed(ranks)});
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    expect_joined(net, ranks, optimizer);
  });
}

// An infinite gradient in one rank's slice alone: no rank takes the step.
TEST(ScalersOfWrappers, RanksThatShardAgreeOnASkippedStep) {
  test::run_ranks(kNormRanks, [](comm::Communicator& ranks) {
    NormNet net;
    FullyShardOptions options;
    options.process_group = test::borrowed(ranks);
    const auto sharded = fully_shard(net, options);
    torch::optim::SGD optimizer(sharded->parameters(), 0.1);
    engine::GradScaler scaler({.init_scale = 8});
    std::vector<at::Tensor> before;
    for (const at::Tensor& slice : sharded->parameters()) before.push_back(slice.detach().clone());
    scaler.scale(net->loss(norm_batch_of(0, ranks.rank()))).backward();
    if (ranks.rank() == 1) {
      for (at::Tensor& slice : sharded->parameters()) {
        if (slice.numel() > 0) slice.mutable_grad().fill_(std::numeric_limits<float>::infinity());
      }
    }
    scaler.step(optimizer);
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 4);
    const std::vector<at::Tensor> after = sharded->parameters();
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(at::equal(after[i], before[i])) << i;
    optimizer.zero_grad();
    scaler.scale(net->loss(norm_batch_of(1, ranks.rank()))).backward();
    scaler.step(optimizer);
    scaler.update();
    bool moved = false;
    for (size_t i = 0; i < before.size(); ++i) moved = moved || !at::equal(sharded->parameters()[i], before[i]);
    EXPECT_TRUE(moved) << "a step with finite gradients is taken";
  });
}

}  // namespace
}  // namespace ds
