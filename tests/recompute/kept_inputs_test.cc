// partition_activations and contiguous_memory_optimization over ranks that are threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <vector>

#include "core/check.h"
#include "dsengine/activation_checkpoint.h"
#include "tests/support/thread_ranks.h"

namespace ds::recompute {
namespace {

using test::run_ranks;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

CheckpointOptions partitioned(comm::Communicator& communicator) {
  return {.partition_activations = true,
          .profile = true,
          .tensor_parallel_group = {std::shared_ptr<void>(), &communicator}};
}

at::Tensor start(at::IntArrayRef sizes) {
  return torch::sin(torch::arange(c10::multiply_integers(sizes), torch::kDouble)).to(torch::kFloat).view(sizes);
}

// Dense, transposed and strided inputs, one of integers, one smaller than the group.
std::vector<at::Tensor> inputs() {
  return {start({5, 7}).requires_grad_(true), start({4, 3}).t(), start({6, 8}).slice(1, 0, 8, 3).requires_grad_(true),
          torch::tensor({1, 0}, torch::kLong), start({1})};
}

std::vector<at::Tensor> combine(const std::vector<at::Tensor>& in) {
  return {in[0].exp().sum() * in[1].pow(2) + in[2].sin().index_select(0, in[3]).sum() * in[4]};
}

TEST(KeptInputs, PartsOfDividedInputsAreGatheredAgain) {
  std::vector<at::Tensor> plain = inputs();
  combine(plain)[0].sum().backward();
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](comm::Communicator& communicator) {
      configure_checkpointing(partitioned(communicator));
      const std::vector<at::Tensor> given = inputs();
      const auto strides = given[2].strides().vec();
      const at::Tensor loss = checkpoint_tensors(checkpoint_options(), combine, given)[0].sum();
      // The copy was taken: changing the input afterwards is allowed.
      const at::Tensor hidden = given[0].detach();
      hidden.zero_();
      loss.backward();
      EXPECT_TRUE(torch::equal(given[0].grad(), plain[0].grad()));
      EXPECT_TRUE(torch::equal(given[2].grad(), plain[2].grad()));
      const int64_t share = (35 + ranks - 1) / ranks + (12 + ranks - 1) / ranks + (18 + ranks - 1) / ranks;
      EXPECT_EQ(take_checkpoint_statistics().bytes_kept, (share + 1) * 4 + 2 * 8);
    });
  }
}

TEST(KeptInputs, StridesAreKept) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    const at::Tensor x = start({4, 3}).t().requires_grad_(true);
    std::vector<std::vector<int64_t>> strides;
    const auto look = [&](const at::Tensor& t) {
      strides.push_back(t.strides().vec());
      return t * 2;
    };
    checkpoint_with(partitioned(communicator), look, x).sum().backward();
    EXPECT_EQ(strides, (std::vector<std::vector<int64_t>>{{1, 3}, {1, 3}}));
  });
}

TEST(KeptInputs, AGroupOfOneKeepsTheInputItself) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    configure_checkpointing(partitioned(communicator));
    const at::Tensor x = start({8}).requires_grad_(true);
    checkpoint([](const at::Tensor& t) { return t.exp(); }, x).sum().backward();
    EXPECT_EQ(communicator.counters().calls[static_cast<size_t>(comm::CollectiveKind::kAllGather)], 0);
    EXPECT_EQ(take_checkpoint_statistics().bytes_kept, 32);
  });
}

TEST(KeptInputs, SlotsAreReusedAfterBackwardAndCounted) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    CheckpointOptions options = partitioned(communicator);
    options.contiguous_memory_optimization = true;
    options.number_checkpoints = 3;
    configure_checkpointing(options);
    const auto exp = [](const at::Tensor& t) { return t.sin(); };
    const at::Tensor x = start({9}).requires_grad_(true);
    const at::Tensor expected = torch::autograd::grad({x.sin().sin().sin().sum()}, {x})[0];
    for (int step = 0; step < 3; ++step) {
      const at::Tensor out = checkpoint(exp, checkpoint(exp, checkpoint(exp, x))).sum();
      // Ranks stay together: none communicates here.
      EXPECT_THAT([&] { checkpoint(exp, x); },
                  ThrowsMessage<UsageError>(AllOf(HasSubstr("number_checkpoints"), HasSubstr("more than 3"))));
      EXPECT_NO_THROW(checkpoint(exp, start({12}).requires_grad_(true))) << "another size has its own buffer";
      x.mutable_grad().reset();
      out.backward();
      EXPECT_TRUE(torch::equal(x.grad(), expected));
    }
    { const at::Tensor dropped = checkpoint(exp, checkpoint(exp, checkpoint(exp, x))); }
    EXPECT_NO_THROW(checkpoint(exp, x)) << "a dropped graph gives its slots back";
  });
}

TEST(KeptInputs, SlotsNeedTheirNumber) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    CheckpointOptions options = partitioned(communicator);
    options.contiguous_memory_optimization = true;
    EXPECT_THAT(
        [&] {
          checkpoint_with(
              options, [](const at::Tensor& t) { return t.sin(); }, start({9}).requires_grad_(true));
        },
        ThrowsMessage<UsageError>(HasSubstr("number_checkpoints")));
  });
}

TEST(KeptInputs, CpuCheckpointingKeepsHostTensorsAsTheyAre) {
  const CheckpointOptions options{.cpu_checkpointing = true, .synchronize_checkpoint_boundary = true, .profile = true};
  const at::Tensor x = start({8}).requires_grad_(true);
  checkpoint_with(
      options, [](const at::Tensor& t) { return t.exp(); }, x)
      .sum()
      .backward();
  EXPECT_TRUE(torch::equal(x.grad(), x.exp()));
}

TEST(KeptInputs, SettingsBelongToAThread) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    configure_checkpointing({.profile = communicator.rank() == 0});
    EXPECT_EQ(checkpoint_options().profile, communicator.rank() == 0);
  });
  EXPECT_FALSE(checkpoint_options().profile);
}

}  // namespace
}  // namespace ds::recompute
