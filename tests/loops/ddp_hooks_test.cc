// Communication hooks: what .grad is after a backward() whose buckets travel in another way than as they are.
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/distributed_data_parallel.h"
#include "dsengine/errors.h"
#include "tests/loops/replicas.h"

namespace ds::ddp_hooks {
namespace {

using test::batch_of;
using test::expect_close;
using test::gradients_of;
using test::loss_of;
using test::shared;
using test::Toy;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int kWorld = 2;

std::vector<at::Tensor> mean_of(int step) {
  Toy model;
  for (int rank = 0; rank < kWorld; ++rank) (loss_of(model->forward(batch_of(rank, step))) / kWorld).backward();
  return gradients_of(*model);
}

// Of three backward passes, each alone: the largest difference to the mean, over the largest element.
double error_of(const CommHook& hook) {
  std::vector<double> worst(kWorld, 0);
  test::run_ranks(kWorld, [&](comm::Communicator& group) {
    Toy model;
    DistributedDataParallel ddp(model, test::small_buckets(group));
    ddp.register_comm_hook(hook);
    for (int step = 0; step < 3; ++step) {
      ddp->zero_grad();
      loss_of(ddp(batch_of(group.rank(), step))).backward();
      const auto wanted = mean_of(step);
      const auto found = gradients_of(*ddp.module);
      double largest = 0;
      double difference = 0;
      for (size_t i = 0; i < wanted.size(); ++i) {
        largest = std::max(largest, wanted[i].abs().max().item<double>());
        difference = std::max(difference, (wanted[i] - found[i]).abs().max().item<double>());
      }
      double& own = worst[static_cast<size_t>(group.rank())];
      own = std::max(own, difference / largest);
    }
  });
  EXPECT_EQ(worst[0], worst[1]) << "the same bits on every rank";
  return worst[0];
}

TEST(DdpHooks, CompressToTheirTolerance) {
  EXPECT_LE(error_of(comm_hooks::AllReduce{}), 1e-6);
  const double float16 = error_of(comm_hooks::Float16{});
  EXPECT_LE(float16, 1e-3);
  EXPECT_GT(float16, 0);
  const double bfloat16 = error_of(comm_hooks::BFloat16{});
  EXPECT_LE(bfloat16, 8e-3);
  EXPECT_GT(bfloat16, float16);
  EXPECT_LE(error_of(comm_hooks::Int8{.use_error_feedback = false}), 2e-2);
  EXPECT_LE(error_of(comm_hooks::TopK{.share = 1.0}), 1e-6) << "all elements";
  EXPECT_LE(error_of(comm_hooks::PowerSgd{.start_iter = 1000}), 1e-6) << "not yet compressed";
}

// What was not sent is sent later: the sum of what arrives is that of the gradients but for what is still kept.
TEST(DdpHooks, ErrorFeedbackLosesNothing) {
  for (const CommHook& hook : std::vector<CommHook>{comm_hooks::Int8{}, comm_hooks::TopK{.share = 0.3}}) {
    constexpr int kSteps = 60;
    test::run_ranks(kWorld, [&](comm::Communicator& group) {
      Toy model;
      DistributedDataParallel ddp(model, test::small_buckets(group));
      ddp.register_comm_hook(hook);
      for (int step = 0; step < kSteps; ++step) {
        const std::vector<at::Tensor> before = gradients_of(*model);
        model->zero_grad();
        loss_of(ddp(batch_of(group.rank(), 0))).backward();
        // Gradients are added outside, so that each pass reduces its own.
        for (size_t i = 0; i < before.size(); ++i) {
          if (before[i].defined()) model->parameters()[i].mutable_grad() = model->parameters()[i].grad() + before[i];
        }
      }
      const auto wanted = mean_of(0);
      const auto found = gradients_of(*model);
      double largest = 0;
      for (const at::Tensor& gradient : wanted) largest = std::max(largest, gradient.abs().max().item<double>());
      for (size_t i = 0; i < wanted.size(); ++i) {
        EXPECT_LE((found[i] / kSteps - wanted[i]).abs().max().item<double>(), 0.15 * largest) << i;
      }
    });
  }
}

// Algorithms 1 and 2 of Vogels et al. on one matrix, of all ranks in one process.
struct PaperPowerSgd {
  PaperPowerSgd(int64_t rows, int64_t columns, int64_t rank) : errors(kWorld, torch::zeros({rows, columns})) {
    at::Generator generator = at::detail::createCPUGenerator(/*seed_val=*/1);
    q = torch::empty({columns * rank}).normal_(0, 1, generator).view({columns, rank});
  }
  static at::Tensor orthonormal(const at::Tensor& columns) { return std::get<0>(torch::linalg_qr(columns)); }

  at::Tensor step(const std::vector<at::Tensor>& gradients) {
    q = orthonormal(q);
    at::Tensor p = torch::zeros({gradients[0].size(0), q.size(1)});
    for (int rank = 0; rank < kWorld; ++rank) p += (gradients[rank] + errors[rank]).mm(q) / kWorld;
    p = orthonormal(p);
    at::Tensor next = torch::zeros_like(q);
    for (int rank = 0; rank < kWorld; ++rank) {
      const at::Tensor corrected = gradients[rank] + errors[rank];
      const at::Tensor own = corrected.t().mm(p);
      next += own / kWorld;
      errors[rank] = corrected - p.mm(own.t());
    }
    q = next;
    return p.mm(q.t());
  }
  std::vector<at::Tensor> errors;
  at::Tensor q;
};

TEST(DdpHooks, PowerSgdIsThePapers) {
  constexpr int64_t kRows = 12;
  constexpr int64_t kColumns = 16;
  const auto gradient = [](int rank, int step) {
    return (torch::sin(torch::arange(kRows * kColumns, torch::kFloat) * 0.9 + rank * 2 + step) +
            torch::cos(torch::arange(kRows * kColumns, torch::kFloat) * 0.21 + step))
        .view({kRows, kColumns});
  };
  struct MatrixImpl : torch::nn::Module {
    MatrixImpl() { weight = register_parameter("weight", torch::zeros({kRows, kColumns})); }
    at::Tensor weight;
  };
  test::run_ranks(kWorld, [&](comm::Communicator& group) {
    for (const int64_t start : {0, 2}) {
      auto model = std::make_shared<MatrixImpl>();
      DistributedDataParallel ddp(model, {.process_group = shared(group)});
      ddp.register_comm_hook(comm_hooks::PowerSgd{.matrix_approximation_rank = 2, .start_iter = start});
      PaperPowerSgd paper(kRows, kColumns, 2);
      for (int step = 0; step < 8; ++step) {
        model->zero_grad();
        (model->weight * gradient(group.rank(), step)).sum().backward();
        const at::Tensor wanted = step < start ? (gradient(0, step) + gradient(1, step)) / 2
                                               : paper.step({gradient(0, step), gradient(1, step)});
        EXPECT_LE((model->weight.grad() - wanted).abs().max().item<double>(), 2e-5) << "step " << step;
      }
    }
  });
}

TEST(DdpHooks, OfAProgram) {
  test::run_ranks(kWorld, [](comm::Communicator& group) {
    Toy model;
    DistributedDataParallel ddp(model, test::small_buckets(group));
    std::vector<size_t> order;
    std::set<std::string> names;
    int last = 0;
    ddp.register_comm_hook(comm_hooks::Own([&](comm_hooks::GradBucket& bucket) {
      order.push_back(bucket.index);
      names.insert(bucket.parameters.begin(), bucket.parameters.end());
      last += bucket.is_last ? 1 : 0;
      EXPECT_EQ(bucket.gradients.size(), bucket.parameters.size());
      // In double: no all-reduce of its own would.
      const at::Tensor wide = bucket.buffer.to(torch::kDouble) / bucket.group.size();
      const comm::Work work = bucket.group.all_reduce(wide, comm::ReduceOp::kSum, "own");
      return [work, wide]() -> at::Tensor {
        work.wait();
        return wide.to(torch::kFloat);
      };
    }));
    for (int step = 0; step < 2; ++step) {
      ddp->zero_grad();
      loss_of(ddp(batch_of(group.rank(), step))).backward();
      expect_close(gradients_of(*model), mean_of(step), 1e-6, "own hook");
    }
    EXPECT_GT(order.size(), 4U);
    EXPECT_TRUE(std::is_sorted(order.rbegin() + static_cast<std::ptrdiff_t>(order.size() / 2), order.rend()));
    EXPECT_EQ(last, 2);
    EXPECT_EQ(names.size(), 8U);
  });
}

TEST(DdpHooks, ThatThrowEndThePassAndNotTheWrapper) {
  test::run_ranks(kWorld, [](comm::Communicator& group) {
    Toy model;
    DistributedDataParallel ddp(model, test::small_buckets(group));
    std::string fails;
    int calls = 0;
    ddp.register_comm_hook(comm_hooks::Own([&](comm_hooks::GradBucket& bucket) {
      if (fails == "start" && ++calls == 2) throw std::runtime_error("a hook that throws");
      const comm::Work work = bucket.group.all_reduce(bucket.buffer, comm::ReduceOp::kAvg, "own");
      return [&, work, buffer = bucket.buffer]() -> at::Tensor {
        work.wait();
        if (fails == "wait") throw std::runtime_error("a hook that throws when it waits");
        return fails == "shape" ? buffer.narrow(0, 0, 1) : buffer;
      };
    }));
    const auto backward = [&] { loss_of(ddp(batch_of(group.rank(), 0))).backward(); };
    fails = "start";
    EXPECT_THAT(backward, ThrowsMessage<std::runtime_error>(HasSubstr("a hook that throws")));
    fails = "wait";
    EXPECT_THAT(backward, ThrowsMessage<std::runtime_error>(HasSubstr("when it waits")));
    fails = "shape";
    EXPECT_THAT(backward, ThrowsMessage<UsageError>(HasSubstr("expected the reduced bucket")));
    fails.clear();
    ddp->zero_grad();
    backward();
    expect_close(gradients_of(*model), mean_of(0), 1e-6, "afterwards");
  });
}

TEST(DdpHooks, AreRefusedByName) {
  test::run_ranks(kWorld, [](comm::Communicator& group) {
    const auto refused = [&](const CommHook& hook, const std::string& message) {
      Toy model;
      DistributedDataParallel ddp(model, test::small_buckets(group));
      EXPECT_THAT([&] { ddp.register_comm_hook(hook); }, ThrowsMessage<UsageError>(HasSubstr(message)));
    };
    refused(comm_hooks::TopK{.share = 0}, "a share above 0 and up to 1, found 0");
    refused(comm_hooks::PowerSgd{.matrix_approximation_rank = 0}, "matrix_approximation_rank above 0");
    refused(comm_hooks::PowerSgd{.start_iter = -1}, "start_iter of 0 or more, found -1");
    refused(comm_hooks::Own(), "found an empty one");
    Toy wide;
    wide->to(torch::kDouble);
    DistributedDataParallel of_doubles(wide, test::small_buckets(group));
    EXPECT_THAT([&] { of_doubles.register_comm_hook(comm_hooks::Int8{}); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("first.weight"), HasSubstr("Double"))));
    Toy model;
    DistributedDataParallel ddp(model, test::small_buckets(group));
    ddp.register_comm_hook(comm_hooks::Float16{});
    EXPECT_THAT([&] { ddp.register_comm_hook(comm_hooks::Float16{}); }, ThrowsMessage<UsageError>(HasSubstr("second")));
    Toy late;
    DistributedDataParallel begun(late, test::small_buckets(group));
    loss_of(begun(batch_of(0, 0))).backward();
    EXPECT_THAT([&] { begun.register_comm_hook(comm_hooks::Float16{}); },
                ThrowsMessage<UsageError>(HasSubstr("before the first backward(), found 1")));
  });
}

}  // namespace
}  // namespace ds::ddp_hooks
