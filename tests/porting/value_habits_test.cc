// Programs that read, copy, average, exchange and change parameters while they train.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "tests/porting/habits_run.h"

namespace ds::engine {
namespace {

State by_number(const std::vector<at::Tensor>& tensors) {
  State state;
  for (size_t i = 0; i < tensors.size(); ++i) state[std::to_string(i)] = tensors[i];
  return state;
}

std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& parameter : parameters) copies.push_back(parameter.detach().clone());
  return copies;
}

Habit moving_average() {
  const auto average = std::make_shared<std::vector<at::Tensor>>();
  Habit habit;
  habit.at_begin = [=](SmallNet& model) { *average = copies_of(model->parameters()); };
  habit.after_step = [=](SmallNet& model) {
    const torch::NoGradGuard no_grad;
    const std::vector<at::Tensor> parameters = model->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) (*average)[i].mul_(0.9).add_(parameters[i], 0.1);
  };
  habit.kept = [=] { return by_number(*average); };
  return habit;
}

// Evaluates with other weights and goes back, in place or with other memory.
Habit exchange(bool set_data) {
  const auto outputs = std::make_shared<std::vector<at::Tensor>>();
  Habit habit;
  habit.after_step = [=](SmallNet& model) {
    const torch::NoGradGuard no_grad;
    const std::vector<at::Tensor> own = copies_of(model->parameters());
    const auto put = [&](double factor) {
      const std::vector<at::Tensor> parameters = model->parameters();
      for (size_t i = 0; i < own.size(); ++i) {
        if (set_data) {
          parameters[i].set_data(own[i] * factor);
        } else {
          at::Tensor(parameters[i]).copy_(own[i] * factor);
        }
      }
    };
    put(0.5);
    outputs->push_back(model->forward(sample(1, 0)));
    put(1.0);
  };
  habit.kept = [=] { return by_number(*outputs); };
  return habit;
}

Habit exchange_in_place() { return exchange(false); }
Habit exchange_of_memory() { return exchange(true); }

Habit one_vector() {
  Habit habit;
  habit.after_step = [](SmallNet& model) {
    const torch::NoGradGuard no_grad;
    const at::Tensor vector = torch::nn::utils::parameters_to_vector(model->parameters());
    torch::nn::utils::vector_to_parameters(vector * 0.95, model->parameters());
  };
  return habit;
}

Habit back_to_the_best() {
  const auto best = std::make_shared<std::vector<at::Tensor>>();
  const auto step = std::make_shared<int>(0);
  Habit habit;
  habit.after_step = [=](SmallNet& model) {
    const torch::NoGradGuard no_grad;
    const int now = (*step)++;
    if (now == 1) *best = copies_of(model->parameters());
    if (now != 3) return;
    const std::vector<at::Tensor> parameters = model->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) at::Tensor(parameters[i]).copy_((*best)[i]);
  };
  return habit;
}

Habit changed_before_the_step() {
  Habit habit;
  habit.before_step = [](SmallNet& model) {
    const torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : model->parameters()) parameter.mul_(0.99);
  };
  return habit;
}

Habit rows_and_columns() {
  Habit habit;
  habit.after_step = [](SmallNet& model) {
    const torch::NoGradGuard no_grad;
    model->last->weight[0].fill_(0.25);
    model->first->weight.select(1, 0).zero_();
    for (at::Tensor& parameter : model->parameters()) parameter.data() *= 0.99;
  };
  return habit;
}

// An alias that is taken once shows and changes the parameter ever after.
Habit alias() {
  const auto shown = std::make_shared<at::Tensor>();
  const auto sums = std::make_shared<std::vector<at::Tensor>>();
  Habit habit;
  habit.at_begin = [=](SmallNet& model) { *shown = model->last->weight.detach(); };
  habit.after_step = [=](SmallNet&) {
    sums->push_back(shown->sum());
    shown->mul_(0.9);
  };
  habit.kept = [=] { return by_number(*sums); };
  return habit;
}

Habit numbers() {
  const auto read = std::make_shared<std::vector<at::Tensor>>();
  Habit habit;
  habit.after_step = [=](SmallNet& model) {
    const double number = model->last->weight[0][0].item<double>() + model->norm->weight.norm().item<double>();
    read->push_back(torch::tensor(number));
  };
  habit.kept = [=] { return by_number(*read); };
  return habit;
}

constexpr NamedHabit kHabits[] = {{"MovingAverage", moving_average},
                                  {"ExchangeInPlace", exchange_in_place},
                                  {"ExchangeOfMemory", exchange_of_memory},
                                  {"OneVector", one_vector},
                                  {"BackToTheBest", back_to_the_best},
                                  {"ChangedBeforeTheStep", changed_before_the_step},
                                  {"RowsAndColumns", rows_and_columns},
                                  {"Alias", alias},
                                  {"Numbers", numbers}};

class ValueHabits : public ::testing::TestWithParam<HabitAtStage> {};

TEST_P(ValueHabits, AreThoseOfTorch) {
  const auto& [habit, stage] = GetParam();
  expect_same_habit(habit.make, small_config(stage, 1));
}

INSTANTIATE_TEST_SUITE_P(All, ValueHabits, ::testing::Combine(::testing::ValuesIn(kHabits), ::testing::Range(0, 4)),
                         name_of_habit);

}  // namespace
}  // namespace ds::engine
