// join(): ranks of 3, 5 and 8 batches against the mathematics that torch documents for it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <string>
#include <vector>

#include "dsengine/distributed_data_parallel.h"
#include "dsengine/errors.h"
#include "dsengine/sync_batch_norm.h"
#include "tests/loops/replicas.h"

namespace ds::ddp_join {
namespace {

using test::batch_of;
using test::expect_close;
using test::loss_of;
using test::shared;
using test::Toy;
using test::values_of;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int kWorld = 3;
constexpr std::array<int, kWorld> kBatches = {3, 8, 5};
constexpr int kMost = 8;

torch::optim::SGD optimizer_of(const Toy& model) {
  return torch::optim::SGD(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
}

// Step by step: the gradients of the ranks that have a batch, over all ranks or over themselves.
std::vector<at::Tensor> plain(bool by_world, const std::array<int, kWorld>& batches) {
  Toy model;
  auto optimizer = optimizer_of(model);
  for (int step = 0; step < kMost; ++step) {
    int active = 0;
    for (const int count : batches) active += step < count ? 1 : 0;
    optimizer.zero_grad();
    for (int rank = 0; rank < kWorld; ++rank) {
      if (step >= batches[static_cast<size_t>(rank)]) continue;
      (loss_of(model->forward(batch_of(rank, step))) / (by_world ? kWorld : active)).backward();
    }
    optimizer.step();
  }
  return values_of(*model);
}

TEST(DdpJoin, RanksWithFewerBatchesShadowTheOthers) {
  for (const bool by_world : {true, false}) {
    const std::vector<at::Tensor> wanted = plain(by_world, kBatches);
    test::run_ranks(kWorld, [&](comm::Communicator& group) {
      for (const bool unused : {false, true}) {
        Toy model;
        auto options = test::small_buckets(group);
        options.find_unused_parameters = unused;
        DistributedDataParallel ddp(model, options);
        auto optimizer = optimizer_of(model);
        int steps = 0;
        ddp.join(
            [&] {
              for (; steps < kBatches[static_cast<size_t>(group.rank())]; ++steps) {
                optimizer.zero_grad();
                loss_of(ddp(batch_of(group.rank(), steps))).backward();
                optimizer.step();
              }
            },
            {.divide_by_initial_world_size = by_world});
        EXPECT_EQ(steps, kBatches[static_cast<size_t>(group.rank())]);
        expect_close(values_of(*model), wanted, 5e-6, "rank " + std::to_string(group.rank()));
      }
    });
  }
}

TEST(DdpJoin, KeepsTheGradientsOfARankThatWaits) {
  test::run_ranks(kWorld, [](comm::Communicator& group) {
    Toy model;
    DistributedDataParallel ddp(model, test::small_buckets(group));
    std::vector<at::Tensor> own;
    ddp.join([&] {
      for (int step = 0; step < kBatches[static_cast<size_t>(group.rank())]; ++step) {
        model->zero_grad();
        loss_of(ddp(batch_of(group.rank(), step))).backward();
        own = test::gradients_of(*model);
      }
    });
    expect_close(test::gradients_of(*model), own, 0, "of its last pass");
    // And the wrapper goes on as before.
    model->zero_grad();
    loss_of(ddp(batch_of(group.rank(), 0))).backward();
    Toy alone;
    for (int rank = 0; rank < kWorld; ++rank) (loss_of(alone->forward(batch_of(rank, 0))) / kWorld).backward();
    expect_close(test::gradients_of(*model), test::gradients_of(*alone), 1e-6, "after join()");
  });
}

TEST(DdpJoin, WithAccumulationAndAHook) {
  const std::array<int, kWorld> batches = {2, 4, 2};
  test::run_ranks(kWorld, [&](comm::Communicator& group) {
    Toy model;
    DistributedDataParallel ddp(model, test::small_buckets(group));
    ddp.register_comm_hook(comm_hooks::TopK{.share = 1.0});
    ddp.join([&] {
      for (int step = 0; step < batches[static_cast<size_t>(group.rank())]; ++step) {
        model->zero_grad();
        {
          const auto scope = ddp.no_sync();
          loss_of(ddp(batch_of(group.rank(), 2 * step))).backward();
        }
        loss_of(ddp(batch_of(group.rank(), 2 * step + 1))).backward();
      }
    });
    if (group.rank() != 1) return;
    Toy alone;  // the last step was rank 1's alone
    for (const int batch : {6, 7}) (loss_of(alone->forward(batch_of(1, batch))) / kWorld).backward();
    expect_close(test::gradients_of(*model), test::gradients_of(*alone), 1e-6, "sum of two batches, over three ranks");
  });
}

TEST(DdpJoin, ThrowsOnEveryRankWhereTold) {
  test::run_ranks(kWorld, [](comm::Communicator& group) {
    Toy model;
    DistributedDataParallel ddp(model, test::small_buckets(group));
    int steps = 0;
    const auto run = [&](bool even) {
      ddp.join(
          [&] {
            for (steps = 0; steps < (even ? 4 : kBatches[static_cast<size_t>(group.rank())]); ++steps) {
              loss_of(ddp(batch_of(group.rank(), steps))).backward();
            }
          },
          {.throw_on_early_termination = true});
    };
    EXPECT_NO_THROW(run(/*even=*/true));
    EXPECT_THAT([&] { run(/*even=*/false); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("none more on rank 0, and some on others"),
                                                HasSubstr(".throw_on_early_termination"))));
    EXPECT_EQ(steps, 3);
    EXPECT_NO_THROW(run(/*even=*/true));
  });
}

TEST(DdpJoin, RefusesLayersThatExchangeInForward) {
  test::run_ranks(2, [](comm::Communicator& group) {
    torch::nn::Sequential model(torch::nn::Linear(7, 4), torch::nn::BatchNorm1d(4));
    convert_sync_batchnorm(*model);
    DistributedDataParallel ddp(model, {.process_group = shared(group)});
    EXPECT_THAT([&] { ddp.join([] {}); },
                ThrowsMessage<UsageError>(
                    AllOf(HasSubstr("join(): layer 1 computes over all"), HasSubstr("equally many batches"))));
  });
}

TEST(DdpJoin, AStaticGraphOfARankThatHadNoFirstPass) {
  test::run_ranks(2, [](comm::Communicator& group) {
    const std::string way = group.rank() == 0 ? "left" : "both";
    Toy model;
    auto options = test::small_buckets(group);
    options.static_graph = true;
    DistributedDataParallel ddp(model, options);
    ddp.join([&] {
      if (group.rank() == 1) loss_of(ddp(batch_of(1, 0), way)).backward();
    });
    Toy alone;
    for (int step = 1; step < 3; ++step) {
      model->zero_grad();
      alone->zero_grad();
      loss_of(ddp(batch_of(group.rank(), step), way)).backward();
      (loss_of(alone->forward(batch_of(0, step), "left")) / 2).backward();
      (loss_of(alone->forward(batch_of(1, step), "both")) / 2).backward();
      expect_close(test::gradients_of(*model), test::gradients_of(*alone), 1e-6, "step " + std::to_string(step));
    }
  });
}

TEST(DdpJoin, BuffersAreThoseOfARankThatIsStillThere) {
  struct CountedImpl : torch::nn::Module {
    CountedImpl() {
      weight = register_parameter("weight", torch::ones({2}));
      seen = register_buffer("seen", torch::zeros({1}));
    }
    at::Tensor forward(double x) {
      const torch::NoGradGuard no_grad;
      seen += x;
      return {};
    }
    at::Tensor weight, seen;
  };
  test::run_ranks(kWorld, [](comm::Communicator& group) {
    const auto model = std::make_shared<CountedImpl>();
    DistributedDataParallel ddp(model, {.process_group = shared(group)});
    ddp.join([&] {
      for (int step = 0; step < kBatches[static_cast<size_t>(group.rank())]; ++step) {
        model->forward(group.rank() == 1 ? 1.0 : 100.0);
        model->weight.sum().backward();
      }
    });
    // The highest rank with a batch: rank 2 (100 each) for five steps, then rank 1 (1 each) for three.
    EXPECT_EQ(model->seen.item<float>(), 503);
  });
}

}  // namespace
}  // namespace ds::ddp_join
