// What .grad is after backward(): torch DistributedDataParallel's rules, each against sums of plain gradients.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/distributed_data_parallel.h"
#include "dsengine/errors.h"
#include "tests/loops/replicas.h"

namespace ds::ddp_gradients {
namespace {

using test::batch_of;
using test::expect_close;
using test::gradients_of;
using test::loss_of;
using test::shared;
using test::Toy;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;

constexpr int kWorld = 2;
constexpr double kTolerance = 1e-6;

using Ddp = DistributedDataParallel<Toy>;

// One backward of each rank, by its way through the network.
struct Pass {
  int step = 0;
  std::vector<std::string> ways = {"both", "both"};
};

// Runs one pass of this rank.
using RunPass = std::function<void(const Pass&)>;

// The mean over ranks of the sum of the passes' gradients; undefined where no rank had one.
std::vector<at::Tensor> mean_of(const std::vector<Pass>& passes) {
  Toy model;
  for (const Pass& pass : passes) {
    for (int rank = 0; rank < kWorld; ++rank) {
      (loss_of(model->forward(batch_of(rank, pass.step), pass.ways[static_cast<size_t>(rank)])) / kWorld).backward();
    }
  }
  return gradients_of(*model);
}

std::vector<Pass> first_passes(int count) {
  std::vector<Pass> passes(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) passes[static_cast<size_t>(i)].step = i;
  return passes;
}

// Runs `body` on each rank, with gradients as views of buckets and as memory of their own.
void on_ranks(const std::function<void(Ddp&, const RunPass&, comm::Communicator&)>& body,
              const DistributedDataParallelOptions& options = {}) {
  test::run_ranks(kWorld, [&](comm::Communicator& group) {
    for (const bool views : {true, false}) {
      Toy model;
      DistributedDataParallelOptions own = options;
      own.process_group = shared(group);
      own.bucket_cap_mb = 3e-4;
      own.first_bucket_mb = 1e-4;
      own.gradient_as_bucket_view = views;
      Ddp ddp(model, own);
      const RunPass run = [&](const Pass& pass) {
        loss_of(ddp(batch_of(group.rank(), pass.step), pass.ways[static_cast<size_t>(group.rank())])).backward();
      };
      body(ddp, run, group);
    }
  });
}

TEST(DdpGradients, AddToWhatIsThere) {
  on_ranks([](Ddp& ddp, const RunPass& run, comm::Communicator&) {
    for (int step = 0; step < 3; ++step) {
      run({step});
      expect_close(gradients_of(*ddp.module), mean_of(first_passes(step + 1)), kTolerance, "sum of passes");
    }
    for (const bool to_none : {false, true}) {
      ddp->zero_grad(to_none);
      run({5});
      expect_close(gradients_of(*ddp.module), mean_of({{5}}), kTolerance, "after zero_grad");
    }
  });
}

TEST(DdpGradients, OfAProgramsOwnMaking) {
  on_ranks([](Ddp& ddp, const RunPass& run, comm::Communicator& group) {
    for (const at::Tensor& parameter : ddp->parameters()) {
      parameter.mutable_grad() = torch::full_like(parameter, group.rank() == 0 ? 2.0 : 4.0);
    }
    run({0});
    std::vector<at::Tensor> wanted = mean_of({{0}});
    for (at::Tensor& gradient : wanted) gradient += 3;
    expect_close(gradients_of(*ddp.module), wanted, kTolerance, "what .grad holds is reduced");
  });
}

TEST(DdpGradients, TwoBackwardsOfOneForward) {
  on_ranks([](Ddp& ddp, const RunPass&, comm::Communicator& group) {
    const at::Tensor loss = loss_of(ddp(batch_of(group.rank(), 0)));
    loss.backward({}, /*retain_graph=*/true);
    expect_close(gradients_of(*ddp.module), mean_of({{0}}), kTolerance, "the first");
    loss.backward();
    expect_close(gradients_of(*ddp.module), mean_of({{0}, {0}}), kTolerance, "both");
    EXPECT_THROW(loss.backward(), std::exception) << "no graph any more";
    ddp->zero_grad();
    loss_of(ddp(batch_of(group.rank(), 1))).backward();
    expect_close(gradients_of(*ddp.module), mean_of({{1}}), kTolerance, "after one that threw");
  });
}

// A pass that throws when all but the first layer's gradients are there, and are being reduced.
void fail_in_the_middle(Ddp& ddp, const at::Tensor& x) {
  const at::Tensor h = torch::tanh(ddp->first(x));
  h.register_hook([](const at::Tensor&) { throw std::runtime_error("in the middle"); });
  const at::Tensor loss = loss_of(ddp->last(torch::tanh(ddp->left(h)) * ddp->right(h)));
  EXPECT_THAT([&] { loss.backward(); }, ThrowsMessage<std::runtime_error>(HasSubstr("in the middle")));
}

TEST(DdpGradients, ABackwardThatThrowsLeavesItUsable) {
  on_ranks([](Ddp& ddp, const RunPass& run, comm::Communicator& group) {
    for (int step = 0; step < 3; ++step) {
      fail_in_the_middle(ddp, batch_of(group.rank(), step));
      ddp->zero_grad();
      run({step});
      expect_close(gradients_of(*ddp.module), mean_of({{step}}), kTolerance, "afterwards");
      ddp->zero_grad();
    }
  });
}

TEST(DdpGradients, AFailedPassIsNotInThoseOfTheNextOne) {
  test::run_ranks(kWorld, [](comm::Communicator& group) {
    for (const bool half : {false, true}) {
      Toy model;
      Ddp ddp(model, test::small_buckets(group));
      if (half) ddp.register_comm_hook(comm_hooks::Float16{});
      for (int step = 0; step < 3; ++step) {
        fail_in_the_middle(ddp, batch_of(group.rank(), step + 7));
        ddp->zero_grad(/*set_to_none=*/false);
        loss_of(ddp(batch_of(group.rank(), step))).backward();
        expect_close(gradients_of(*model), mean_of({{step}}), half ? 1e-3 : kTolerance, half ? "halves" : "whole");
      }
    }
  });
}

TEST(DdpGradients, OfPassesUnderNoSyncAreReducedByTheNextOne) {
  on_ranks([](Ddp& ddp, const RunPass& run, comm::Communicator& group) {
    {
      const auto scope = ddp.no_sync();
      const auto inner = ddp.no_sync();
      run({0});
      Toy alone;
      loss_of(alone->forward(batch_of(group.rank(), 0))).backward();
      expect_close(gradients_of(*ddp.module), gradients_of(*alone), kTolerance, "this rank's own");
    }
    run({1});
    expect_close(gradients_of(*ddp.module), mean_of({{0}, {1}}), kTolerance, "the sum");
  });
}

TEST(DdpGradients, UnusedOnSomeRanksAndOnAll) {
  on_ranks(
      [](Ddp& ddp, const RunPass& run, comm::Communicator&) {
        run({0, {"left", "left"}});  // nobody uses `right`
        expect_close(gradients_of(*ddp.module), mean_of({{0, {"left", "left"}}}), kTolerance, "undefined stays");
        run({1, {"left", "right"}});
        expect_close(gradients_of(*ddp.module), mean_of({{0, {"left", "left"}}, {1, {"left", "right"}}}), kTolerance,
                     "one rank's counts");
        run({2, {"right", "right"}});
        expect_close(gradients_of(*ddp.module),
                     mean_of({{0, {"left", "left"}}, {1, {"left", "right"}}, {2, {"right", "right"}}}), kTolerance,
                     "old ones stay as they were");
        ddp->zero_grad(/*set_to_none=*/true);
        run({3, {"both", "both"}});
        expect_close(gradients_of(*ddp.module), mean_of({{3}}), kTolerance, "all again");
      },
      {.find_unused_parameters = true});
}

// Neither a mean of three equal numbers nor what a hook sends is the number itself.
TEST(DdpGradients, UnusedOnesKeepEveryBit) {
  test::run_ranks(3, [](comm::Communicator& group) {
    for (const bool half : {false, true}) {
      Toy model;
      DistributedDataParallelOptions options = test::small_buckets(group);
      options.find_unused_parameters = true;
      Ddp ddp(model, options);
      if (half) ddp.register_comm_hook(comm_hooks::Float16{});
      loss_of(ddp(batch_of(group.rank(), 0), "both")).backward();
      const at::Tensor kept = model->right->weight.grad().clone();
      for (int step = 1; step < 4; ++step) {
        loss_of(ddp(batch_of(group.rank(), step), "left")).backward();
        EXPECT_TRUE(torch::equal(model->right->weight.grad(), kept)) << "step " << step;
      }
      loss_of(ddp(batch_of(group.rank(), 4), group.rank() == 1 ? "right" : "left")).backward();
      Toy alone;
      (loss_of(alone->forward(batch_of(1, 4), "right")) / 3).backward();
      expect_close({model->right->weight.grad()}, {kept + alone->right->weight.grad()}, half ? 1e-3 : kTolerance,
                   "used by one rank");
    }
  });
}

TEST(DdpGradients, UsedUnderNoSyncIsUsed) {
  on_ranks(
      [](Ddp& ddp, const RunPass& run, comm::Communicator&) {
        {
          const auto scope = ddp.no_sync();
          run({0, {"right", "left"}});
        }
        run({1, {"left", "left"}});
        expect_close(gradients_of(*ddp.module), mean_of({{0, {"right", "left"}}, {1, {"left", "left"}}}), kTolerance,
                     "right, of rank 0");
      },
      {.find_unused_parameters = true});
}

TEST(DdpGradients, UnusedWithoutTheOptionIsAnErrorInTheNextPass) {
  on_ranks([](Ddp& ddp, const RunPass& run, comm::Communicator& group) {
    run({0, {"left", "left"}});
    const auto message = AllOf(HasSubstr("right.weight, right.bias"), HasSubstr(".find_unused_parameters = true"));
    EXPECT_THAT([&] { ddp(batch_of(group.rank(), 1)); }, ThrowsMessage<UsageError>(message));
    run({1});
    run({0, {"right", "right"}});
    const at::Tensor loss = loss_of(ddp->forward(batch_of(group.rank(), 1)));
    EXPECT_THAT(
        [&] { loss.backward(); },
        ThrowsMessage<UsageError>(AllOf(HasSubstr("left.weight"), HasSubstr("backward()"), Not(HasSubstr("right")))));
    ddp->zero_grad();
    run({2});
    expect_close(gradients_of(*ddp.module), mean_of({{2}}), kTolerance, "told once");
  });
}

TEST(DdpGradients, AStaticGraphIsFoundOutInTheFirstPass) {
  on_ranks(
      [](Ddp& ddp, const RunPass& run, comm::Communicator& group) {
        for (int step = 0; step < 3; ++step) {
          ddp->zero_grad();
          run({step, {"left", "left"}});
          expect_close(gradients_of(*ddp.module), mean_of({{step, {"left", "left"}}}), kTolerance, "left alone");
        }
        EXPECT_THAT([&] { loss_of(ddp(batch_of(group.rank(), 3))).backward(); },
                    ThrowsMessage<UsageError>(AllOf(HasSubstr("static_graph"), HasSubstr("right.weight, right.bias"))));
      },
      {.static_graph = true});
}

// Runs backward() inside backward, for the weight too.
struct Reentrant : torch::autograd::Function<Reentrant> {
  struct Layer {
    torch::nn::Linear linear;
  };
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const Layer& layer) {
    context->save_for_backward({x});
    context->saved_data["weight"] = layer.linear->weight;
    context->saved_data["bias"] = layer.linear->bias;
    return torch::linear(x, layer.linear->weight, layer.linear->bias).detach();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const torch::AutoGradMode grad(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    torch::linear(x, context->saved_data["weight"].toTensor(), context->saved_data["bias"].toTensor())
        .backward(gradients[0]);
    return {x.grad(), at::Tensor()};
  }
};

TEST(DdpGradients, OfPassesInsideThePass) {
  const auto wanted = [](bool twice) {
    Toy model;
    for (int rank = 0; rank < kWorld; ++rank) {
      const at::Tensor x = batch_of(rank, 0);
      at::Tensor h = model->first(x);
      if (twice) h = h + model->first(x.sin());
      (loss_of(model->last(model->left(h) * model->right(h))) / kWorld).backward();
    }
    return gradients_of(*model);
  };
  for (const bool twice : {false, true}) {  // the same weight in two of them: static_graph's case
    on_ranks(
        [&](Ddp& ddp, const RunPass&, comm::Communicator& group) {
          for (int step = 0; step < 3; ++step) {
            ddp->zero_grad();
            const at::Tensor x = batch_of(group.rank(), 0).requires_grad_();
            at::Tensor h = Reentrant::apply(x, Reentrant::Layer{ddp->first});
            if (twice) h = h + Reentrant::apply(x.sin(), Reentrant::Layer{ddp->first});
            loss_of(ddp->last(Reentrant::apply(h, Reentrant::Layer{ddp->left}) * ddp->right(h))).backward();
            expect_close(gradients_of(*ddp.module), wanted(twice), kTolerance, twice ? "twice" : "once");
          }
        },
        {.static_graph = twice});
  }
}

struct NormedImpl : torch::nn::Module {
  NormedImpl() {
    norm = register_module("norm", torch::nn::BatchNorm1d(7));
    linear = register_module("linear", torch::nn::Linear(7, 2));
  }
  at::Tensor forward(const at::Tensor& x) { return linear(norm(x)); }
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Normed);

TEST(DdpBuffers, FollowRankZero) {
  for (const bool by_wrapper : {true, false}) {
    for (const bool broadcast : {true, false}) {
      torch::nn::BatchNorm1d alone(7);  // as rank 0's
      for (int step = 0; step < 3; ++step) alone(batch_of(0, step));
      test::run_ranks(kWorld, [&](comm::Communicator& group) {
        Normed model;
        model->norm->running_mean.fill_(group.rank());
        DistributedDataParallel ddp(model, {.process_group = shared(group), .broadcast_buffers = broadcast});
        EXPECT_EQ(model->norm->running_mean.sum().item<float>(), 0) << "rank 0's, at the start";
        for (int step = 0; step < 3; ++step) {
          const at::Tensor x = batch_of(group.rank(), step);
          loss_of(by_wrapper ? ddp(x) : ddp.module->forward(x)).backward();
        }
        if (by_wrapper && broadcast) {
          const torch::NoGradGuard no_grad;
          model->eval();
          ddp(batch_of(0, 0));
        }
        const bool same = torch::allclose(model->norm->running_mean, alone->running_mean, 1e-6, 1e-7);
        EXPECT_EQ(same, broadcast || group.rank() == 0);
        EXPECT_EQ(model->norm->num_batches_tracked.item<int64_t>(), 3);
      });
    }
  }
}

}  // namespace
}  // namespace ds::ddp_gradients
