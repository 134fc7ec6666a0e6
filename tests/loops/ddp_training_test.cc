// Plain loops around DistributedDataParallel against plain torch in one process on the joined batch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/text.h"
#include "dsengine/distributed_data_parallel.h"
#include "tests/loops/replicas.h"
#include "tests/loops/shortened_table.h"

namespace ds::ddp_training {
namespace {

using test::batch_of;
using test::expect_close;
using test::loss_of;
using test::MakeOptimizer;
using test::optimizers;
using test::shared;
using test::Toy;
using test::values_of;

constexpr int kSteps = 50;
constexpr double kTolerance = 5e-6;

at::Tensor joined_batch(int world, int step) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < world; ++rank) all.push_back(batch_of(rank, step));
  return torch::cat(all);
}

// Values after all steps.
std::vector<at::Tensor> plain(int world, const MakeOptimizer& make, int accumulation = 1) {
  Toy model;
  const auto optimizer = make(model->parameters());
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    for (int micro = 0; micro < accumulation; ++micro) {
      loss_of(model->forward(joined_batch(world, step * accumulation + micro))).backward();
    }
    optimizer->step();
  }
  return values_of(*model);
}

class EveryOptimizer : public testing::TestWithParam<std::string> {};

TEST_P(EveryOptimizer, TrainsAsPlainTorchDoes) {
  const MakeOptimizer& make = optimizers().at(GetParam());
  for (const int world : {1, 2, 3}) {
    const std::vector<at::Tensor> wanted = plain(world, make);
    test::run_ranks(world, [&](comm::Communicator& group) {
      for (const bool views : {true, false}) {
        Toy model;
        model->fill(group.rank());  // others than rank 0's
        auto options = test::small_buckets(group);
        options.gradient_as_bucket_view = views;
        DistributedDataParallel ddp(model, options);
        const auto optimizer = make(model->parameters());
        for (int step = 0; step < kSteps; ++step) {
          optimizer->zero_grad(/*set_to_none=*/step % 2 == 0);
          const at::Tensor x = batch_of(group.rank(), step);
          loss_of(step % 3 == 0 ? ddp(x) : step % 3 == 1 ? ddp->forward(x) : ddp.module->forward(x)).backward();
          optimizer->step();
        }
        expect_close(values_of(*model), wanted, kTolerance, GetParam());
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Loops, EveryOptimizer, testing::Values("SGD", "Adam", "AdamW", "RMSprop", "Adagrad"),
                         [](const auto& of) { return of.param; });

TEST(DdpTraining, AccumulatesUnderNoSyncAndReducesTheSum) {
  const MakeOptimizer& make = optimizers().at("SGD");
  const std::vector<at::Tensor> wanted = plain(2, make, /*accumulation=*/3);
  test::run_ranks(2, [&](comm::Communicator& group) {
    for (const bool views : {true, false}) {
      Toy model;
      auto options = test::small_buckets(group);
      options.gradient_as_bucket_view = views;
      DistributedDataParallel ddp(model, options);
      const auto optimizer = make(model->parameters());
      int batch = 0;
      for (int step = 0; step < kSteps; ++step) {
        optimizer->zero_grad();
        {
          const auto scope = ddp.no_sync();
          const comm::CommCounters before = group.counters();
          for (int micro = 0; micro < 2; ++micro) loss_of(ddp(batch_of(group.rank(), batch++))).backward();
          EXPECT_EQ(group.counters().total_bytes_sent(), before.total_bytes_sent());
        }
        loss_of(ddp(batch_of(group.rank(), batch++))).backward();
        optimizer->step();
      }
      expect_close(values_of(*model), wanted, kTolerance, "accumulated");
    }
  });
}

TEST(DdpTraining, SendsTheGradientsOnceAndNothingElse) {
  test::run_ranks(2, [](comm::Communicator& group) {
    Toy model;
    DistributedDataParallel ddp(model, {.process_group = shared(group)});
    int64_t bytes = 0;
    for (const at::Tensor& parameter : model->parameters()) bytes += static_cast<int64_t>(parameter.nbytes());
    for (int step = 0; step < 3; ++step) {
      group.reset_counters();
      loss_of(ddp(batch_of(group.rank(), step))).backward();
      // 2 n (W - 1) / W, and padding of at most a bucket's alignment for each parameter.
      EXPECT_GE(group.counters().total_bytes_sent(), bytes);
      EXPECT_LE(group.counters().total_bytes_sent(), bytes + 64 * 10);
    }
  });
}

// Reductions begin inside backward: those of the last layers before the first layer's gradient is there.
TEST(DdpTraining, ReducesWhileBackwardRuns) {
  test::run_ranks(2, [](comm::Communicator& group) {
    Toy model;
    DistributedDataParallel ddp(model, test::small_buckets(group));
    int64_t sent_before_first = 0;
    const at::Tensor h = torch::tanh(model->first(batch_of(group.rank(), 0)));
    h.register_hook([&](const at::Tensor&) { sent_before_first = group.counters().total_bytes_sent(); });
    const int64_t before = group.counters().total_bytes_sent();
    loss_of(model->last(torch::tanh(model->left(h)) * model->right(h))).backward();
    EXPECT_GT(sent_before_first, before);
    EXPECT_GT(group.counters().total_bytes_sent(), sent_before_first);
  });
}

TEST(DdpTraining, SeveralDtypesInOneModule) {
  struct MixedImpl : torch::nn::Module {
    MixedImpl() {
      wide = register_parameter("wide", torch::linspace(-1, 1, 6, torch::kDouble));
      narrow = register_parameter("narrow", torch::linspace(-1, 1, 6, torch::kFloat));
      half = register_parameter("half", torch::linspace(-1, 1, 6, torch::kBFloat16));
    }
    at::Tensor forward(double x) { return (wide * x).sum() + (narrow * x).sum() + (half * x).sum(); }
    at::Tensor wide, narrow, half;
  };
  test::run_ranks(2, [](comm::Communicator& group) {
    const auto model = std::make_shared<MixedImpl>();
    DistributedDataParallel ddp(model, {.process_group = shared(group)});
    ddp(group.rank() == 0 ? 1.0 : 2.0).backward();
    for (const at::Tensor& parameter : model->parameters()) {
      ASSERT_EQ(parameter.grad().scalar_type(), parameter.scalar_type());
      EXPECT_TRUE(torch::equal(parameter.grad(), torch::full_like(parameter, 1.5))) << parameter.grad();
    }
  });
}

TEST(DdpTraining, TablesThatForwardShortensAreThoseOfOneProcess) {
  const at::Tensor expected = test::table_of_plain_loop(2);
  test::run_ranks(2, [&](comm::Communicator& group) {
    test::ShortenedTable model;
    DistributedDataParallel ddp(model, {.process_group = shared(group)});
    torch::optim::SGD optimizer(model->parameters(), 0.5);
    for (int64_t step = 0; step < test::kTableSteps; ++step) {
      optimizer.zero_grad();
      model->loss(test::rows_of(step, group.rank())).backward();
      optimizer.step();
    }
    EXPECT_LT((model->table->weight.detach() - expected).abs().max().item<double>(), 1e-6);
  });
}

// An autoencoder whose decoder shows the encoder's weight turned over.
torch::nn::Sequential turned_over() {
  torch::nn::Sequential model(torch::nn::Linear(7, 4), torch::nn::Tanh(), torch::nn::Linear(4, 7));
  const torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : model->parameters()) {
    parameter.copy_((torch::sin(torch::arange(parameter.numel(), torch::kFloat) * 0.7) * 0.4).view(parameter.sizes()));
  }
  model->ptr<torch::nn::LinearImpl>(2)->weight.set_data(model->ptr<torch::nn::LinearImpl>(0)->weight.detach().t());
  return model;
}

// Trains on the inputs of steps; returns the values.
std::vector<at::Tensor> train_turned_over(torch::nn::Sequential model, const std::function<at::Tensor(int)>& input) {
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    torch::mse_loss(model->forward(input(step)), input(step)).backward();
    optimizer.step();
  }
  return values_of(*model);
}

// Parameters stay where they are, so that two over one memory stay one.
TEST(DdpTraining, TwoParametersOverOneMemoryTrainAsPlainTorchDoes) {
  const auto expected = train_turned_over(turned_over(), [](int step) { return joined_batch(2, step); });
  test::run_ranks(2, [&](comm::Communicator& group) {
    torch::nn::Sequential model = turned_over();
    DistributedDataParallel ddp(model, {.process_group = shared(group)});
    expect_close(train_turned_over(model, [&](int step) { return batch_of(group.rank(), step); }), expected, kTolerance,
                 cat("rank ", group.rank()));
  });
}

}  // namespace
}  // namespace ds::ddp_training
