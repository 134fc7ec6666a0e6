// What a region refuses, and that it leaves nothing behind.
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <stdexcept>

#include "core/check.h"
#include "dsengine/activation_checkpoint.h"

namespace ds::recompute {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

at::Tensor ones(int64_t count) { return torch::ones({count}).requires_grad_(true); }

at::Tensor twice(const at::Tensor& t) { return t * t; }

TEST(CheckpointErrors, AnInputChangedInPlaceAfterwards) {
  const at::Tensor hidden = ones(4).exp();
  const at::Tensor out = checkpoint(twice, hidden).sum();
  {
    const torch::NoGradGuard no_grad;
    hidden.add_(1);
  }
  EXPECT_THAT([&] { out.backward(); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("input 0"), HasSubstr("changed in place"))));
}

TEST(CheckpointErrors, ACapturedTensorChangedInPlaceAfterwards) {
  const at::Tensor weight = ones(4);
  const at::Tensor out = checkpoint([weight](const at::Tensor& t) { return t * weight; }, ones(4)).sum();
  {
    const torch::NoGradGuard no_grad;
    weight.add_(1);
  }
  EXPECT_THAT([&] { out.backward(); }, ThrowsMessage<UsageError>(HasSubstr("changed in place")));
}

TEST(CheckpointErrors, AFunctionThatChangesItsInput) {
  const at::Tensor hidden = ones(4).exp();
  EXPECT_THAT([&] { checkpoint([](const at::Tensor& t) { return t.mul_(2).sin(); }, hidden); },
              ThrowsMessage<UsageError>(HasSubstr("changed its input 0")));
  EXPECT_THAT([&] { checkpoint([hidden](const at::Tensor& t) { return hidden.mul_(2) * t; }, ones(4)); },
              ThrowsMessage<UsageError>(HasSubstr("by the function itself")));
}

TEST(CheckpointErrors, OtherOutputsTheSecondTime) {
  int run = 0;
  const auto shape = [&run](const at::Tensor& t) { return ++run == 1 ? t * 2 : t.narrow(0, 0, 2); };
  EXPECT_THAT([&] { checkpoint(shape, ones(4)).sum().backward(); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("output 0"), HasSubstr("[2]"), HasSubstr("[4]"))));
  run = 0;
  const auto dtype = [&run](const at::Tensor& t) { return ++run == 1 ? t * 2 : t.to(torch::kDouble); };
  EXPECT_THAT([&] { checkpoint(dtype, ones(4)).sum().backward(); }, ThrowsMessage<UsageError>(HasSubstr("output 0")));
  run = 0;
  const auto number = [&run](const at::Tensor& t) {
    return ++run == 1 ? std::vector<at::Tensor>{t.sin()} : std::vector<at::Tensor>{t.sin(), t};
  };
  EXPECT_THAT([&] { checkpoint(number, ones(4))[0].sum().backward(); },
              ThrowsMessage<UsageError>(HasSubstr("2 outputs: expected 1")));
}

TEST(CheckpointErrors, OtherTensorsTheSecondTime) {
  const at::Tensor first = ones(4);
  const at::Tensor second = ones(4);
  const at::Tensor older = ones(4).exp();
  for (const at::Tensor& other : {second, older}) {
    int run = 0;
    const auto choose = [&](const at::Tensor& t) { return t * (++run == 1 ? first : other); };
    EXPECT_THAT([&] { checkpoint(choose, ones(4)).sum().backward(); },
                ThrowsMessage<UsageError>(HasSubstr("which the first run did not read")));
  }
  EXPECT_FALSE(first.grad().defined());
  EXPECT_FALSE(second.grad().defined());
}

TEST(CheckpointErrors, DoubleBackward) {
  const at::Tensor x = ones(4);
  const at::Tensor out = checkpoint(twice, x).sum();
  EXPECT_THAT([&] { torch::autograd::grad({out}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true); },
              ThrowsMessage<UsageError>(HasSubstr("double backward")));
}

TEST(CheckpointErrors, TheSecondBackwardIsLibTorchsError) {
  const at::Tensor out = checkpoint(twice, ones(4)).sum();
  out.backward();
  EXPECT_THAT([&] { out.backward(); }, ThrowsMessage<c10::Error>(HasSubstr("a second time")));
}

TEST(CheckpointErrors, AFunctionThatThrowsLeavesNothingBehind) {
  const at::Tensor weight = ones(4);
  const at::Tensor captured = weight.exp();
  const auto node = captured.grad_fn();
  const auto state = [] { return torch::rand({2}); };
  int run = 0;
  int fails = 1;
  const auto fragile = [&](const at::Tensor& t) {
    const at::Tensor made = torch::dropout(t * weight * captured, 0.5, true);
    if (++run == fails) throw std::runtime_error("the program's own");
    return made;
  };
  torch::manual_seed(3);
  EXPECT_THAT([&] { checkpoint(fragile, weight); }, ThrowsMessage<std::runtime_error>(HasSubstr("own")));
  EXPECT_TRUE(at::GradMode::is_enabled());
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  run = 0;
  fails = 2;
  const at::Tensor out = checkpoint(fragile, weight).sum();
  torch::manual_seed(5);
  EXPECT_THAT([&] { out.backward({}, /*retain_graph=*/true); }, ThrowsMessage<std::runtime_error>(HasSubstr("own")));
  const at::Tensor drawn = state();
  torch::manual_seed(5);
  EXPECT_TRUE(torch::equal(drawn, state()));
  EXPECT_TRUE(weight.is_leaf());
  EXPECT_EQ(captured.grad_fn(), node);
  EXPECT_TRUE(at::GradMode::is_enabled());
  out.backward();  // the third run succeeds
  EXPECT_TRUE(weight.grad().defined());
  EXPECT_FALSE(checkpoint_options().profile);
}

TEST(CheckpointErrors, ParametersMustBeSeen) {
  const at::DisableRecordFunctionGuard blind;
  EXPECT_THAT([] { checkpoint(twice, ones(4)); }, ThrowsMessage<UsageError>(HasSubstr("RecordFunction")));
}

TEST(CheckpointErrors, NumberCheckpointsMustBePositive) {
  EXPECT_THAT([] { configure_checkpointing({.number_checkpoints = 0}); },
              ThrowsMessage<UsageError>(HasSubstr("number_checkpoints")));
}

}  // namespace
}  // namespace ds::recompute
