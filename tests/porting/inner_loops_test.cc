// Mistakes near at hand in programs with a loop inside of each step: the right result, or an error with the way out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "tests/porting/ported_run.h"
#include "tests/support/own_optimizers.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int kLoopSteps = 4;

std::vector<at::Tensor> values_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> values;
  for (const at::Tensor& parameter : module.parameters()) values.push_back(parameter.detach().clone());
  return values;
}

void set_values(const torch::nn::Module& module, const std::vector<at::Tensor>& values) {
  const torch::NoGradGuard no_grad;
  const std::vector<at::Tensor> parameters = module.parameters();
  for (size_t i = 0; i < values.size(); ++i) parameters[i].copy_(values[i]);
}

// The gradients of this rank's loss alone.
std::vector<at::Tensor> own_gradients(SmallNet& model, const at::Tensor& x) {
  return torch::autograd::grad({model->loss(x)}, model->parameters());
}

// The loss where each weight has gone along its gradient, without a change of the parameters.
at::Tensor loss_above(SmallNet& model, const at::Tensor& x, const std::vector<at::Tensor>& gradients) {
  const std::vector<at::Tensor> p = model->parameters();
  const auto above = [&](size_t i) { return p[i] + 0.1 * gradients[i]; };
  const at::Tensor normed = torch::layer_norm(torch::linear(x, above(0), above(1)), {11}, above(2), above(3));
  const at::Tensor y = torch::linear(torch::tanh(normed), above(4), above(5));
  return (y - x.narrow(1, 0, 3).sin() * 3.0).pow(2).mean();
}

class InnerLoops : public ::testing::TestWithParam<int> {};

// Sharpness-aware minimisation with the gradient of each rank's own batch, as it is usual with DistributedDataParallel:
// weights that ranks move otherwise, even for one pass, are an error. A functional forward needs no such move.
TEST_P(InnerLoops, WeightsThatEachRankMovesByItselfAreAnErrorAndAFunctionalForwardIsRight) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    const at::Tensor x = sample(0, communicator.rank());
    const std::vector<at::Tensor> gradients = own_gradients(model, x);
    const std::vector<at::Tensor> before = values_of(*model);
    std::vector<at::Tensor> moved;
    for (size_t i = 0; i < before.size(); ++i) moved.push_back(before[i] + 0.1 * gradients[i]);
    set_values(*model, moved);
    engine->backward(model->loss(x));
    set_values(*model, before);
    EXPECT_THAT([&] { engine->step(); }, ThrowsMessage<UsageError>(AllOf(HasSubstr("changed or frozen parameters"),
                                                                         HasSubstr("add such a move in forward"))));
  });
  SmallNet plain;
  torch::optim::AdamW optimizer(plain->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  for (int step = 0; step < kLoopSteps; ++step) {
    optimizer.zero_grad();
    for (int rank = 0; rank < 2; ++rank) {
      const at::Tensor x = sample(step, rank);
      (loss_above(plain, x, own_gradients(plain, x)) / 2).backward();
    }
    optimizer.step();
  }
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    for (int step = 0; step < kLoopSteps; ++step) {
      const at::Tensor x = sample(step, communicator.rank());
      engine->backward(loss_above(model, x, own_gradients(model, x)));
      engine->step();
    }
    EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), parameters_of(*plain)), 1e-5);
  });
}

// Langevin dynamics by loss.backward() and x.grad(), as many programs have it.
TEST_P(InnerLoops, GradientsOfInputsComeByAutogradGradOrFromAFrozenModel) {
  const State expected = TorchRun{.world = 2, .steps = 2}.train_adamw();
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    const at::Tensor x = sample(0, communicator.rank()).requires_grad_();
    const at::Tensor wanted = torch::autograd::grad({model->forward(x).sum()}, {x})[0];
    EXPECT_THAT([&] { model->forward(x).sum().backward(); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("outside of engine->backward()"),
                                                HasSubstr("torch::autograd::grad({loss}, {input})"))));
    x.mutable_grad() = at::Tensor();
    {
      const auto frozen = frozen_scope(model);
      model->forward(x).sum().backward();
    }
    EXPECT_TRUE(x.grad().allclose(wanted));
    EXPECT_LT(largest_difference(train(*engine, model, 2), expected), 2e-6) << "something is left of the failed pass";
  });
}

// bf16: a pass over moved weights, whose gradients are dropped, leaves the masters as they are to the last bit.
TEST_P(InnerLoops, WeightsThatAreMovedForAPassKeepTheirMasters) {
  const auto train_in_bf16 = [&](bool looks_around) {
    State weights;
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), with_bf16(small_config(GetParam(), 1)), communicator).engine;
      for (int step = 0; step < kLoopSteps; ++step) {
        const at::Tensor x = sample(step, communicator.rank());
        if (looks_around) {
          engine->backward(model->loss(x));
          const std::vector<at::Tensor> before = values_of(*model);
          std::vector<at::Tensor> moved;
          for (const at::Tensor& value : before) moved.push_back(value * 1.1);
          set_values(*model, moved);
          engine->zero_grad();
          engine->backward(model->loss(x));
          set_values(*model, before);
          engine->zero_grad();
        }
        engine->backward(model->loss(x));
        engine->step();
      }
      const State own = copy_of(engine->fp32_state_dict());
      if (communicator.rank() == 0) weights = own;
    });
    return weights;
  };
  EXPECT_EQ(largest_difference(train_in_bf16(true), train_in_bf16(false)), 0.0);
}

// fp16: along a gradient that has overflowed weights become NaN. They are put back, and the step is skipped.
TEST_P(InnerLoops, AMoveAlongAGradientThatHasOverflowedLeavesNothing) {
  nlohmann::ordered_json config = small_config(GetParam(), 1);
  config["fp16"] = {{"enabled", true}, {"initial_scale_power", 18}, {"hysteresis", 1}};
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    State masters = copy_of(engine->fp32_state_dict());
    for (int step = 0; step < 12; ++step) {
      const at::Tensor x = sample(step % 2, communicator.rank());
      engine->backward(model->loss(x));
      const std::vector<at::Tensor> before = values_of(*model), parameters = model->parameters();
      std::vector<at::Tensor> moved;
      for (size_t i = 0; i < before.size(); ++i) {
        const at::Tensor gradient = engine->safe_get_full_grad(parameters[i]);
        moved.push_back((before[i] + 0.01 * gradient / gradient.norm()).to(torch::kHalf));
      }
      set_values(*model, moved);
      engine->zero_grad();
      engine->backward(model->loss(x));
      set_values(*model, before);
      engine->step();
      const State now = copy_of(engine->fp32_state_dict());
      EXPECT_EQ(largest_difference(now, masters) == 0.0, !engine->was_step_applied()) << step;
      for (const auto& [name, values] : now) EXPECT_TRUE(values.isfinite().all().item<bool>()) << name;
      masters = now;
    }
    EXPECT_GT(engine->skipped_steps(), 0);
    EXPECT_GT(engine->global_steps(), engine->skipped_steps());
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, InnerLoops, ::testing::Values(0, 1, 2, 3), stage_name);

// Sharpness-aware minimisation as a class around another optimizer, which calls its closure twice a step.
class SharpSgd : public torch::optim::Optimizer {
 public:
  explicit SharpSgd(const std::vector<at::Tensor>& parameters)
      : Optimizer({torch::optim::OptimizerParamGroup(parameters)}, std::make_unique<torch::optim::SGDOptions>(0.05)),
        base_(parameters, torch::optim::SGDOptions(0.05).momentum(0.9)) {}
  at::Tensor step(LossClosure closure = nullptr) override {
    const torch::NoGradGuard no_grad;
    TORCH_CHECK(closure, "SharpSgd needs a closure");
    at::Tensor loss = call(closure);
    const std::vector<at::Tensor> parameters = param_groups()[0].params();
    at::Tensor square = torch::zeros({});
    for (const at::Tensor& parameter : parameters) square = square + parameter.grad().pow(2).sum();
    std::vector<at::Tensor> before;
    for (const at::Tensor& parameter : parameters) {
      before.push_back(parameter.detach().clone());
      parameter.add_(0.1 * parameter.grad() / square.sqrt());
    }
    zero_grad();
    call(closure);
    for (size_t i = 0; i < before.size(); ++i) parameters[i].copy_(before[i]);
    base_.step();
    return loss;
  }

 private:
  static at::Tensor call(const LossClosure& closure) {
    const torch::AutoGradMode with_gradients(true);
    return closure();
  }
  torch::optim::SGD base_;
};

Initialized start_sharp(SmallNet& model, int stage, comm::Communicator& communicator) {
  nlohmann::ordered_json config = small_config(stage, 1);
  config.erase("optimizer");
  return initialize({.model = model.ptr(),
                     .config = config,
                     .optimizer = std::make_shared<SharpSgd>(model->parameters()),
                     .communicator = borrowed(communicator)});
}

TEST(OptimizersThatCallTheirClosureTwice, AgreeWithAPlainLoopAtStage0) {
  SmallNet plain;
  SharpSgd optimizer(plain->parameters());
  std::vector<double> expected;
  for (int step = 0; step < kLoopSteps; ++step) {
    const at::Tensor loss = optimizer.step([&] {
      optimizer.zero_grad();
      at::Tensor found = (plain->loss(sample(step, 0)) + plain->loss(sample(step, 1))) / 2;
      found.backward();
      return found;
    });
    expected.push_back(loss.item<double>());
  }
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start_sharp(model, 0, communicator).engine;
    for (int step = 0; step < kLoopSteps; ++step) {
      const at::Tensor loss = engine->step([&] {
        at::Tensor found = model->loss(sample(step, communicator.rank()));
        engine->backward(found);
        return found;
      });
      EXPECT_NEAR(loss.item<double>(), expected[static_cast<size_t>(step)], 1e-5) << step;
    }
    EXPECT_LT(largest_difference(parameters_of(*model), parameters_of(*plain)), 1e-5);
  });
}

TEST(OptimizersThatCallTheirClosureTwice, AreRefusedWhereTheyWouldWorkOnSlices) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    EXPECT_THAT([&] { start_sharp(model, 2, communicator); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("SharpSgd"), HasSubstr("needs a closure"),
                                                 HasSubstr("zero_optimization.stage 0 in float32"))));
  });
}

// A class that can do without a closure passes as one that updates each element by itself, and is told all the same.
TEST(OptimizersThatCallTheirClosureTwice, AreToldOfStage0WhereTheyAreGivenAClosureElsewhere) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    nlohmann::ordered_json config = small_config(2, 1);
    config.erase("optimizer");
    const auto engine = initialize({.model = model.ptr(),
                                    .config = config,
                                    .optimizer = std::make_shared<SignMomentum>(model->parameters(), OwnOptions(0.1)),
                                    .communicator = borrowed(communicator)})
                            .engine;
    const auto closure = [&] {
      at::Tensor found = model->loss(sample(0, communicator.rank()));
      engine->backward(found);
      return found;
    };
    EXPECT_THAT([&] { engine->step(closure); },
                ThrowsMessage<UsageError>(HasSubstr("several times in a step works at zero_optimization.stage 0")));
  });
}

}  // namespace
}  // namespace ds::engine
