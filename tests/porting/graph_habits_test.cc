// Programs that do more in forward and backward than one loss of one batch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "core/check.h"
#include "tests/porting/habits_run.h"

namespace ds::engine {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

double backward_of(const at::Tensor& loss, const Backward& backward) {
  backward(loss, false);
  return loss.item<double>();
}

Habit hook_on_a_parameter() {
  Habit habit;
  habit.at_begin = [](SmallNet& model) {
    model->first->weight.register_hook([](const at::Tensor& gradient) { return gradient * 3; });
  };
  return habit;
}

Habit two_losses_of_one_graph() {
  Habit habit;
  habit.pass = [](SmallNet& model, const at::Tensor& x, const Backward& backward) {
    const at::Tensor y = model->forward(x);
    const at::Tensor first = y.pow(2).mean();
    const at::Tensor second = (y - 1).abs().mean();
    backward(first, true);
    return first.item<double>() + backward_of(second, backward);
  };
  return habit;
}

Habit two_forwards_and_parameters_in_the_loss() {
  Habit habit;
  habit.pass = [](SmallNet& model, const at::Tensor& x, const Backward& backward) {
    at::Tensor loss = model->loss(x) + 0.5 * model->loss(x.flip(0) * 0.9);
    for (const at::Tensor& parameter : model->parameters()) loss = loss + 1e-2 * parameter.pow(2).sum();
    return backward_of(loss.to(torch::kDouble).view({1, 1}), backward);
  };
  return habit;
}

// Weight norm, and a spectral norm whose vector comes from an iteration without a graph.
Habit normed_weights() {
  Habit habit;
  habit.pass = [](SmallNet& model, const at::Tensor& x, const Backward& backward) {
    const at::Tensor& weight = model->first->weight;
    at::Tensor direction;
    {
      const torch::NoGradGuard no_grad;
      direction = torch::mv(weight.t(), torch::ones({11}));
      direction = direction / direction.norm();
    }
    const at::Tensor spectral = weight / torch::mv(weight, direction).norm();
    const at::Tensor rows = weight / weight.norm(2, 1, /*keepdim=*/true);
    const at::Tensor y = torch::tanh(torch::linear(x, spectral + rows, model->first->bias));
    return backward_of((model->last(model->norm(y)) - 1).pow(2).mean(), backward);
  };
  return habit;
}

Habit gradients_in_the_loss() {
  Habit habit;
  habit.pass = [](SmallNet& model, const at::Tensor& x, const Backward& backward) {
    at::Tensor loss = model->loss(x);
    const auto gradients = torch::autograd::grad({loss}, model->parameters(), {}, /*retain_graph=*/true,
                                                 /*create_graph=*/true);
    for (const at::Tensor& gradient : gradients) loss = loss + 0.01 * gradient.pow(2).sum();
    return backward_of(loss, backward);
  };
  return habit;
}

Habit adversarial_inputs() {
  Habit habit;
  habit.pass = [](SmallNet& model, const at::Tensor& x, const Backward& backward) {
    const at::Tensor input = x.clone().requires_grad_(true);
    const at::Tensor slope = torch::autograd::grad({model->loss(input)}, {input})[0];
    return backward_of(model->loss((input + 0.01 * slope.sign()).detach()), backward);
  };
  return habit;
}

Habit evaluation_before_the_step() {
  Habit habit;
  habit.before_step = [](SmallNet& model) {
    model->eval();
    const torch::NoGradGuard no_grad;
    model->forward(sample(3, 0));
    model->train();
  };
  return habit;
}

// A forward that is not used, one that fails, and then the right one.
Habit exceptions_that_are_caught() {
  Habit habit;
  habit.pass = [](SmallNet& model, const at::Tensor& x, const Backward& backward) {
    try {
      model->loss(x);
      throw std::runtime_error("a sample cannot be used");
    } catch (const std::runtime_error&) {  // the next one can
    }
    EXPECT_THROW(model->forward(torch::zeros({2, 5})), c10::Error);
    return backward_of(model->loss(x), backward);
  };
  return habit;
}

constexpr NamedHabit kGraphHabits[] = {{"HookOnAParameter", hook_on_a_parameter},
                                       {"TwoLossesOfOneGraph", two_losses_of_one_graph},
                                       {"TwoForwardsAndParametersInTheLoss", two_forwards_and_parameters_in_the_loss},
                                       {"NormedWeights", normed_weights},
                                       {"GradientsInTheLoss", gradients_in_the_loss},
                                       {"AdversarialInputs", adversarial_inputs},
                                       {"EvaluationBeforeTheStep", evaluation_before_the_step},
                                       {"ExceptionsThatAreCaught", exceptions_that_are_caught}};

class GraphHabits : public ::testing::TestWithParam<HabitAtStage> {};

TEST_P(GraphHabits, AreThoseOfTorch) {
  const auto& [habit, stage] = GetParam();
  expect_same_habit(habit.make, small_config(stage, 1));
}

INSTANTIATE_TEST_SUITE_P(All, GraphHabits,
                         ::testing::Combine(::testing::ValuesIn(kGraphHabits), ::testing::Range(0, 4)), name_of_habit);

class Graphs : public ::testing::TestWithParam<int> {};

// As torch's optimizers have it, which change parameters in place: its gradient would be of weights that are gone.
TEST_P(Graphs, OfBeforeAStepIsRefusedByAutograd) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    const at::Tensor old = model->loss(sample(1, communicator.rank()));
    engine->backward(model->loss(sample(0, communicator.rank())));
    engine->step();
    EXPECT_THAT([&] { engine->backward(old); }, ThrowsMessage<c10::Error>(HasSubstr("modified by an inplace")));
    engine->zero_grad();
    engine->backward(model->loss(sample(1, communicator.rank())));
    engine->step();
  });
}

// A rank without samples in this step: its sum is zero, and so are its gradients.
TEST_P(Graphs, OfAnEmptyBatchGiveZeros) {
  const auto loss_of = [](SmallNet& model, int step, int rank) {
    const at::Tensor x = sample(step, rank).slice(0, 0, rank == 1 && step % 2 == 1 ? 0 : 4);
    return (model->forward(x) - 1).pow(2).sum() / 12;
  };
  SmallNet plain;
  torch::optim::AdamW optimizer(plain->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    for (int rank = 0; rank < 2; ++rank) (loss_of(plain, step, rank) / 2).backward();
    optimizer.step();
  }
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    for (int step = 0; step < 4; ++step) {
      engine->backward(loss_of(model, step, communicator.rank()));
      engine->step();
    }
    EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), parameters_of(*plain)), 1e-5);
  });
}

struct CloneableNetImpl : torch::nn::Cloneable<CloneableNetImpl> {
  CloneableNetImpl() { CloneableNetImpl::reset(); }
  void reset() override { layer = register_module("layer", torch::nn::Linear(6, 5)); }
  at::Tensor forward(const at::Tensor& x) { return layer(x); }
  torch::nn::Linear layer{nullptr};
};

// As reinforcement learning keeps a target network.
TEST_P(Graphs, OfACloneAreTheProgramsOwn) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const auto model = std::make_shared<CloneableNetImpl>();
    fill(*model);
    const auto engine = start(model, small_config(GetParam(), 1), communicator).engine;
    const at::Tensor x = sample(0, communicator.rank());
    engine->backward(model->forward(x).pow(2).mean());
    engine->step();
    const auto target = std::dynamic_pointer_cast<CloneableNetImpl>(model->clone());
    EXPECT_TRUE(target->forward(x).equal(model->forward(x)));
    const at::Tensor kept = target->layer->weight.detach().clone();
    engine->backward((model->forward(x) - target->forward(x).detach() + 1).pow(2).mean());
    engine->step();
    EXPECT_TRUE(target->layer->weight.equal(kept));
    EXPECT_FALSE(model->layer->weight.equal(kept));
    target->forward(x).sum().backward();
    EXPECT_GT(target->layer->weight.grad().norm().item<double>(), 0.0);
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, Graphs, ::testing::Values(0, 1, 2, 3), stage_name);

}  // namespace
}  // namespace ds::engine
