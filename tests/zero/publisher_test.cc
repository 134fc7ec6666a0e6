#include <ATen/ThreadLocalState.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <barrier>
#include <thread>

#include "core/op_interceptor.h"
#include "tests/support/thread_ranks.h"
#include "zero/gather/parameter_publisher.h"

namespace ds::zero {
namespace {

TEST(OpInterceptor, SeesTheInputsOfEveryOperatorOnItsThread) {
  torch::nn::Linear linear(3, 2);
  int reads = 0;
  OpInterceptor interceptor([&](const at::Tensor& tensor) { reads += tensor.is_alias_of(linear->weight); });
  linear->forward(torch::ones({1, 3}));
  EXPECT_EQ(reads, 0) << "not enabled yet";
  interceptor.enable();
  linear->forward(torch::ones({1, 3}));
  EXPECT_GT(reads, 0);
  const int before = reads;
  torch::stack({linear->weight, linear->weight});
  EXPECT_GE(reads, before + 2) << "tensors inside lists count";
  interceptor.disable();
  const int after = reads;
  linear->forward(torch::ones({1, 3}));
  EXPECT_EQ(reads, after);
}

TEST(OpInterceptor, SeesWhatAnotherThreadRunsInItsPlace) {
  const at::Tensor weight = torch::ones({2, 2});
  int reads = 0;
  OpInterceptor interceptor([&](const at::Tensor& tensor) { reads += tensor.is_alias_of(weight); });
  interceptor.enable();
  const at::ThreadLocalState state;  // what autograd carries to its threads
  std::thread([&] {
    at::matmul(weight, weight);
    EXPECT_EQ(reads, 0) << "an operator of its own";
    const at::ThreadLocalStateGuard guard(state);
    at::matmul(weight, weight);
    EXPECT_GT(reads, 0);
  }).join();
}

// Ranks that are threads, each with a device: a thread of autograd serves one after the other.
TEST(OpInterceptor, SeesItsOwnThreadsOperatorsOnAThreadThatServesSeveral) {
  const at::Tensor weight = torch::ones({2, 2});
  constexpr int kThreads = 3;
  std::array<int, kThreads> reads{};
  std::array<at::ThreadLocalState, kThreads> states;
  std::barrier<> step(kThreads + 1);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      OpInterceptor interceptor([&, t](const at::Tensor& tensor) {
        reads[t] += tensor.is_alias_of(weight);
        EXPECT_GT(OpInterceptor::outermost_operator(), 0U);
      });
      interceptor.enable();
      states[t] = at::ThreadLocalState();
      step.arrive_and_wait();  // enabled
      step.arrive_and_wait();  // served
    });
  }
  step.arrive_and_wait();
  for (int t = 0; t < kThreads; ++t) {
    const at::ThreadLocalStateGuard guard(states[t]);
    at::matmul(weight, weight);
    for (int other = 0; other < kThreads; ++other) EXPECT_EQ(reads[other] > 0, other <= t) << other << " after " << t;
  }
  step.arrive_and_wait();
  for (std::thread& thread : threads) thread.join();
}

TEST(ParameterPublisher, AForwardReadsWhatAllRanksPublished) {
  for (int world : {1, 2, 4}) {
    test::run_ranks(world, [&](comm::Communicator& communicator) {
      torch::nn::Sequential net(torch::nn::Linear(8, 8), torch::nn::Tanh(), torch::nn::Linear(8, 4));
      std::vector<Parameter> parameters;
      std::vector<LayoutParameter> shapes;
      for (const auto& item : net->named_parameters()) {
        parameters.push_back({item.key(), item.value()});
        shapes.push_back({item.key(), item.value().numel()});
      }
      std::vector<ParameterBucket> buckets;
      for (BucketLayout& layout : lay_out(shapes, {.world_size = world, .max_bucket_elements = 40})) {
        const at::Tensor values = flatten(layout, parameters, at::kFloat);
        buckets.emplace_back(std::move(layout), parameters, values, at::kFloat);
      }
      ParameterPublisher publisher(buckets, communicator, /*partitioned=*/true);
      for (int step = 1; step <= 3; ++step) {
        for (size_t b = 0; b < buckets.size(); ++b) {
          torch::NoGradGuard no_grad;
          buckets[b].slice(communicator.rank()).fill_(0.1 * step);
          publisher.updated(b);
        }
        const at::Tensor y = net->forward(torch::ones({1, 8}));
        const double hidden = std::tanh(0.1 * step * 9);
        EXPECT_NEAR(y[0][3].item<double>(), 0.1 * step * (8 * hidden + 1), 1e-5);
        publisher.wait_all();
        for (const Parameter& parameter : parameters) {
          EXPECT_TRUE(torch::allclose(parameter.tensor, torch::full_like(parameter.tensor, 0.1 * step)));
        }
      }
    });
  }
}

}  // namespace
}  // namespace ds::zero
