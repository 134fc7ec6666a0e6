// What programs do to a model out of habit in every step, on plain LibTorch and on the engine.
#pragma once

#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "tests/porting/ported_run.h"

namespace ds::engine {

// loss.backward({}, retain_graph), or the engine's.
using Backward = std::function<void(const at::Tensor& loss, bool retain_graph)>;

// Made anew for each run and rank; what is not set is left out.
struct Habit {
  std::function<void(SmallNet&)> at_begin = {};
  // Forward and backward of one rank's batch; returns its loss.
  std::function<double(SmallNet&, const at::Tensor& x, const Backward&)> pass = [](SmallNet& model, const at::Tensor& x,
                                                                                   const Backward& backward) {
    const at::Tensor loss = model->loss(x);
    backward(loss, false);
    return loss.item<double>();
  };
  std::function<void(SmallNet&)> before_step = {};
  std::function<void(SmallNet&)> after_step = {};
  // What the program has kept, beside the weights.
  std::function<State()> kept = {};
};

using MakeHabit = std::function<Habit()>;

struct NamedHabit {
  const char* name;
  Habit (*make)();
};
using HabitAtStage = std::tuple<NamedHabit, int>;

inline std::string name_of_habit(const ::testing::TestParamInfo<HabitAtStage>& cell) {
  return std::string(std::get<0>(cell.param).name) + "Stage" + std::to_string(std::get<1>(cell.param));
}

struct HabitResult {
  PortedResult trained;
  State kept;
};

inline void act(const std::function<void(SmallNet&)>& action, SmallNet& model) {
  if (action) action(model);
}

inline HabitResult live_plainly(const MakeHabit& make, const PortedRun& run = {}) {
  const Habit habit = make();
  SmallNet model;
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  HabitResult result;
  act(habit.at_begin, model);
  for (int step = 0; step < run.steps; ++step) {
    optimizer.zero_grad();
    double loss = 0;
    for (int rank = 0; rank < run.world; ++rank) {
      loss += habit.pass(model, sample(step, rank), [&](const at::Tensor& one, bool retain_graph) {
        (one / run.world).backward({}, retain_graph);
      });
    }
    act(habit.before_step, model);
    optimizer.step();
    act(habit.after_step, model);
    result.trained.losses.push_back(loss / run.world);
  }
  result.trained.weights = parameters_of(*model);
  if (habit.kept) result.kept = habit.kept();
  return result;
}

inline HabitResult live_on_engine(const MakeHabit& make, const nlohmann::ordered_json& config,
                                  const PortedRun& run = {}) {
  HabitResult result;
  test::run_ranks(run.world, [&](comm::Communicator& communicator) {
    const Habit habit = make();
    SmallNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    std::vector<double> losses;
    act(habit.at_begin, model);
    for (int step = 0; step < run.steps; ++step) {
      const double loss =
          habit.pass(model, sample(step, communicator.rank()),
                     [&](const at::Tensor& one, bool retain_graph) { engine->backward(one, retain_graph); });
      act(habit.before_step, model);
      engine->step();
      act(habit.after_step, model);
      losses.push_back(mean_over(communicator, loss));
    }
    const State weights = copy_of(engine->fp32_state_dict());
    const State kept = habit.kept ? habit.kept() : State();
    if (communicator.rank() == 0) result = {.trained = {.losses = losses, .weights = weights}, .kept = kept};
  });
  return result;
}

inline void expect_same_habit(const MakeHabit& make, const nlohmann::ordered_json& config) {
  const HabitResult expected = live_plainly(make);
  const HabitResult found = live_on_engine(make, config);
  expect_same(found.trained, expected.trained);
  EXPECT_LT(largest_difference(found.kept, expected.kept), 10 * kSameResult);
}

}  // namespace ds::engine
