// REINFORCE on a cart that is to stay near the middle. Episodes end when it leaves, so that ranks play for different
// numbers of steps: forwards that differ run in a scope in which the policy is whole.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/model/small_run.h"
#include "tests/porting/programs.h"

namespace ds::engine {
namespace {

constexpr int kEpisodes = 4;  // a step, on all ranks
constexpr int kLongest = 14;

struct Policy {
  Policy() { draw_weights(*net, 8); }
  torch::nn::Sequential net{torch::nn::Linear(2, 16), torch::nn::Tanh(), torch::nn::Linear(16, 2)};
};

struct Episode {
  at::Tensor states;   // [steps, 2]: place and speed
  at::Tensor actions;  // [steps]: 0 or 1
  at::Tensor returns;  // [steps]
};

Episode play(Policy& policy, int number) {
  const torch::NoGradGuard no_grad;
  at::Generator generator = generator_of(8000 + static_cast<uint64_t>(number));
  const at::Tensor luck = torch::rand({kLongest + 2}, generator, torch::kDouble);
  double place = luck[0].item<double>() - 0.5;
  double speed = luck[1].item<double>() - 0.5;
  std::vector<at::Tensor> states;
  std::vector<int64_t> actions;
  while (static_cast<int>(states.size()) < kLongest && std::abs(place) < 1.0) {
    states.push_back(torch::tensor({place, speed}, torch::kDouble).to(torch::kFloat));
    const double right = torch::softmax(policy.net->forward(states.back()), 0)[1].item<double>();
    actions.push_back(luck[static_cast<int64_t>(states.size()) + 1].item<double>() < right ? 1 : 0);
    speed += actions.back() == 1 ? 0.2 : -0.2;
    place += 0.5 * speed;
  }
  const auto steps = static_cast<int64_t>(states.size());
  const at::Tensor returns = torch::arange(steps, 0, -1).to(torch::kFloat);  // 1 for each step that is left
  return {torch::stack(states), torch::tensor(actions), returns};
}

// The mean over episodes, which may have different lengths.
at::Tensor loss_of(Policy& policy, const std::vector<Episode>& episodes) {
  at::Tensor total = torch::zeros({});
  for (const Episode& episode : episodes) {
    const at::Tensor chances = torch::log_softmax(policy.net->forward(episode.states), 1);
    const at::Tensor chosen = chances.gather(1, episode.actions.unsqueeze(1)).squeeze(1);
    total = total - (chosen * (episode.returns - 5.0)).sum();
  }
  return total / static_cast<double>(episodes.size());
}

Losses train_policy_plainly(int /*world*/) {
  Policy policy;
  torch::optim::AdamW optimizer(policy.net->parameters(), adamw_options());
  Losses losses;
  bool lengths_differ = false;
  for (int step = 0; step < kProgramSteps; ++step) {
    std::vector<Episode> episodes;
    for (int i = 0; i < kEpisodes; ++i) episodes.push_back(play(policy, step * kEpisodes + i));
    lengths_differ = lengths_differ || episodes.front().states.size(0) != episodes.back().states.size(0);
    optimizer.zero_grad();
    const at::Tensor loss = loss_of(policy, episodes);
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  EXPECT_TRUE(lengths_differ);
  return losses;
}

Losses train_policy_on_engine(comm::Communicator& communicator, const Config& zero) {
  Policy policy;
  const auto engine = start(policy.net.ptr(), adamw_config(zero), communicator).engine;
  const int own = kEpisodes / communicator.size();
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    std::vector<Episode> episodes;
    {
      const auto whole = engine->gathered_parameters(policy.net->parameters());
      const int first = step * kEpisodes + own * communicator.rank();
      for (int i = 0; i < own; ++i) episodes.push_back(play(policy, first + i));
    }
    const at::Tensor loss = loss_of(policy, episodes);
    engine->backward(loss);
    engine->step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

}  // namespace

Program policy_gradient() {
  return {.name = "PolicyGradient", .train_plainly = train_policy_plainly, .train_on_engine = train_policy_on_engine};
}

}  // namespace ds::engine
