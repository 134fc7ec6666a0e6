// Programs with a loop inside of each step: sharpness-aware minimisation, an energy model with Langevin chains,
// Q-learning from a replay buffer, kernels of Gaussian processes, and local steps between averages of the models.
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/model/small_run.h"
#include "tests/porting/trainer.h"

namespace ds::engine {
namespace {

namespace nn = torch::nn;

// --- sharpness-aware minimisation (SAM): the second pass is made where the first gradient leads ---------------------

// The mean gradients of the global batch.
std::vector<at::Tensor> mean_gradients(const nn::Module& net, const TrainedModel& model) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& parameter : net.parameters()) {
    const auto engine = model.engine();
    result.push_back(engine ? engine->safe_get_full_grad(parameter) : parameter.grad().clone());
  }
  return result;
}

void drop_gradients(nn::Module& net, const TrainedModel& model) {
  if (const auto engine = model.engine()) return engine->zero_grad();
  net.zero_grad();
}

// Moves the weights by `radius` along the gradients, and returns those before.
std::vector<at::Tensor> climb(const nn::Module& net, const std::vector<at::Tensor>& gradients, double radius) {
  const torch::NoGradGuard no_grad;
  at::Tensor square = torch::zeros({});
  for (const at::Tensor& gradient : gradients) square = square + gradient.pow(2).sum();
  std::vector<at::Tensor> before;
  const std::vector<at::Tensor> parameters = net.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    before.push_back(parameters[i].clone());
    parameters[i].add_(radius * gradients[i] / square.sqrt());
  }
  return before;
}

void put_back(const nn::Module& net, const std::vector<at::Tensor>& before) {
  const torch::NoGradGuard no_grad;
  const std::vector<at::Tensor> parameters = net.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(before[i]);
}

Losses train_by_sharpness(const Trainer& trainer) {
  nn::Sequential net(nn::Linear(4, 16), nn::SiLU(), nn::Linear(16, 3));
  draw_weights(*net, 281);
  const auto model = trainer.train(net.ptr(), {.lr = 5e-3, .clip_norm = 0.5});
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const at::Tensor x = trainer.part(normal({kGlobalBatch, 4}, 28100 + static_cast<uint64_t>(step)));
    const auto loss_of_batch = [&] { return torch::cross_entropy_loss(net->forward(x), x.slice(1, 0, 3).argmax(1)); };
    const at::Tensor loss = loss_of_batch();
    model->backward(loss);
    const std::vector<at::Tensor> before = climb(*net, mean_gradients(*net, *model), 0.2);
    drop_gradients(*net, *model);
    const at::Tensor above = loss_of_batch();
    model->backward(above);
    put_back(*net, before);
    model->step();
    losses.insert(losses.end(), {loss.item<double>(), above.item<double>()});
  }
  losses.push_back(sum_of_weights(*net));
  return losses;
}

// --- an energy model: Langevin chains that go on between steps follow gradients of the inputs -----------------------

Losses train_energy(const Trainer& trainer) {
  nn::Sequential net(nn::Linear(2, 24), nn::SiLU(), nn::Linear(24, 24), nn::SiLU(), nn::Linear(24, 1));
  draw_weights(*net, 282);
  constexpr int kMicroBatches = 2;
  const auto model = trainer.train(net.ptr(), {.lr = 3e-3, .clip_norm = 1.0, .accumulation = kMicroBatches});
  at::Tensor chains = trainer.part(normal({kGlobalBatch, 2}, 283));
  Losses losses;
  for (int micro = 0; micro < kProgramSteps * kMicroBatches; ++micro) {
    const auto seed = static_cast<uint64_t>(28300 + 10 * micro);
    for (uint64_t move = 0; move < 3; ++move) {
      const at::Tensor x = chains.detach().requires_grad_();
      const at::Tensor slope = torch::autograd::grad({net->forward(x).sum()}, {x})[0];
      chains = x.detach() - 0.1 * slope + 0.1 * trainer.part(normal({kGlobalBatch, 2}, seed + move));
    }
    const at::Tensor real = trainer.part(normal({kGlobalBatch, 2}, seed + 9) * 0.3 + 1.0);
    const at::Tensor loss = torch::softplus(net->forward(real)).mean() + torch::softplus(-net->forward(chains)).mean();
    model->backward(loss);
    model->step();
    losses.push_back(loss.item<double>());
  }
  losses.push_back(sum_of_weights(*net));
  return losses;
}

// --- Q-learning: a replay buffer, and a target network without an optimizer that follows in place -------------------

// Carts that are to stay near the middle, one for each row.
struct Carts {
  at::Tensor state() const { return torch::stack({place, speed}, 1); }
  at::Tensor step(const at::Tensor& action) {
    speed = (speed + 0.4 * action.to(torch::kFloat) - 0.2).clamp(-1, 1);
    place = (place + 0.5 * speed).clamp(-2, 2);
    return 2 - place.pow(2);
  }
  at::Tensor place, speed;
};

struct Replay {
  std::vector<at::Tensor> states, actions, rewards, next;  // of each time
};

at::Tensor value_of(const at::Tensor& values, const at::Tensor& actions) {
  return values.gather(1, actions.unsqueeze(1)).squeeze(1);
}

// The temporal difference of a transition of each cart, from a time of its own, by double Q-learning.
at::Tensor difference_of(const Replay& replay, const at::Tensor& times, nn::Sequential& net, nn::Sequential& target) {
  const auto pick = [&](const std::vector<at::Tensor>& all) {
    return torch::stack(all).index({times, torch::arange(times.size(0))});
  };
  at::Tensor wanted;
  {
    const torch::NoGradGuard no_grad;
    const at::Tensor next = pick(replay.next);
    wanted = pick(replay.rewards) + 0.9 * value_of(target->forward(next), net->forward(next).argmax(1));
  }
  return value_of(net->forward(pick(replay.states)), pick(replay.actions)) - wanted;
}

Losses train_q(const Trainer& trainer) {
  const auto values = [] { return nn::Sequential(nn::Linear(2, 24), nn::Tanh(), nn::Linear(24, 2)); };
  nn::Sequential net = values(), target = values();
  draw_weights(*net, 284);
  draw_weights(*target, 284);
  const auto model = trainer.train(net.ptr(), {.lr = 1e-2});
  const auto target_model = trainer.evaluate(target.ptr());
  Carts carts{.place = trainer.part(normal({kGlobalBatch}, 285)), .speed = trainer.part(normal({kGlobalBatch}, 286))};
  Replay replay;
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const auto seed = static_cast<uint64_t>(28500 + 10 * step);
    {
      const torch::NoGradGuard no_grad;
      replay.states.push_back(carts.state());
      const at::Tensor best = net->forward(carts.state()).argmax(1);
      const at::Tensor luck = trainer.part(uniform({kGlobalBatch, 2}, seed));
      const at::Tensor drawn = luck.select(1, 1).gt(0.5).to(torch::kLong);
      replay.actions.push_back(torch::where(luck.select(1, 0).lt(0.3), drawn, best));
      replay.rewards.push_back(carts.step(replay.actions.back()));
      replay.next.push_back(carts.state());
    }
    const at::Tensor times = trainer.part(integers(step + 1, {kGlobalBatch}, seed + 1));
    const at::Tensor difference = difference_of(replay, times, net, target);
    const at::Tensor loss = torch::huber_loss(difference, torch::zeros_like(difference));
    model->backward(loss);
    model->step();
    losses.push_back(loss.item<double>());
    const torch::NoGradGuard no_grad;
    const std::vector<at::Tensor> own = net->parameters(), followers = target->parameters();
    for (size_t i = 0; i < own.size(); ++i) followers[i].lerp_(own[i], 0.2);
  }
  losses.push_back(sum_of_weights(*net) + sum_of_weights(*target));
  return losses;
}

// --- kernels of Gaussian processes: features, lengths and noises are learnt through a Cholesky factor ---------------

struct KernelImpl : nn::Module {
  KernelImpl() {
    features = register_module("features", nn::Sequential(nn::Linear(1, 8), nn::Tanh(), nn::Linear(8, 2)));
    draw_weights(*this, 287);
    log_length = register_parameter("log_length", torch::tensor(0.1));
    log_size = register_parameter("log_size", torch::tensor(0.2));
    log_noise = register_parameter("log_noise", torch::tensor(-1.0));
    to(torch::kDouble);
  }
  // The negative logarithm of the marginal likelihood, for each observation.
  at::Tensor loss(const at::Tensor& x, const at::Tensor& y) {
    const at::Tensor z = features->forward(x) * (-log_length).exp();
    const at::Tensor squares = (z.unsqueeze(0) - z.unsqueeze(1)).pow(2).sum(2);
    const at::Tensor noise = log_noise.exp() * torch::eye(x.size(0), x.options());
    const at::Tensor lower = torch::linalg_cholesky(log_size.exp() * (-0.5 * squares).exp() + noise);
    const at::Tensor solved = torch::cholesky_solve(y, lower);
    return ((0.5 * y * solved).sum() + lower.diagonal().log().sum()) / x.size(0);
  }
  nn::Sequential features;
  at::Tensor log_length, log_size, log_noise;
};
TORCH_MODULE(Kernel);

Losses train_kernel(const Trainer& trainer) {
  Kernel net;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(net->features->parameters(), std::make_unique<torch::optim::AdamOptions>(5e-3));
  groups.emplace_back(std::vector<at::Tensor>{net->log_length, net->log_size, net->log_noise},
                      std::make_unique<torch::optim::AdamOptions>(5e-2));
  const auto adam = std::make_shared<torch::optim::Adam>(groups, torch::optim::AdamOptions(5e-3));
  const auto model = trainer.train(net.ptr(), {.optimizer = adam});
  const int own = kGlobalBatch / trainer.world();
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    at::Tensor loss = torch::zeros({}, torch::kDouble);
    for (int task = trainer.rank() * own; task < (trainer.rank() + 1) * own; ++task) {
      const auto seed = static_cast<uint64_t>(28700 + 10 * (step * kGlobalBatch + task));
      const at::Tensor x = 4 * uniform({4 + task, 1}, seed).to(torch::kDouble);
      loss = loss + net->loss(x, (2 * x).sin() + 0.1 * normal({4 + task, 1}, seed + 1)) / own;
    }
    model->backward(loss);
    model->step();
    losses.push_back(loss.item<double>());
  }
  losses.push_back(sum_of_weights(*net));
  return losses;
}

// --- local steps: each rank trains a model of its own, an engine over a group of itself, and they are averaged ------

constexpr int kLocalSteps = 3;

nn::Sequential local_net() {
  nn::Sequential net(nn::Linear(4, 16), nn::Tanh(), nn::Linear(16, 1));
  draw_weights(*net, 288);
  return net;
}

at::Tensor local_loss(nn::Sequential& net, const at::Tensor& x) {
  return torch::mse_loss(net->forward(x), x.sum(1, true) + 1);
}

at::Tensor local_batch(int step) { return normal({kGlobalBatch, 4}, 28800 + static_cast<uint64_t>(step)); }

Losses train_locally_in_plain_loops(int world) {
  std::vector<nn::Sequential> nets;
  std::vector<std::unique_ptr<torch::optim::AdamW>> optimizers;
  for (int rank = 0; rank < world; ++rank) {
    nets.push_back(local_net());
    optimizers.push_back(std::make_unique<torch::optim::AdamW>(nets.back()->parameters(), adamw_options()));
  }
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    losses.push_back(0);
    const std::vector<at::Tensor> parts = local_batch(step).chunk(world);
    for (size_t rank = 0; rank < nets.size(); ++rank) {
      optimizers[rank]->zero_grad();
      const at::Tensor loss = local_loss(nets[rank], parts[rank]);
      loss.backward();
      optimizers[rank]->step();
      losses.back() += loss.item<double>() / world;
    }
    if (step % kLocalSteps != kLocalSteps - 1) continue;
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < nets[0]->parameters().size(); ++i) {
      at::Tensor mean = torch::zeros_like(nets[0]->parameters()[i]);
      for (const nn::Sequential& net : nets) mean += net->parameters()[i] / world;
      for (const nn::Sequential& net : nets) net->parameters()[i].copy_(mean);
    }
  }
  losses.push_back(sum_of_weights(*nets[0]));
  return losses;
}

Losses train_locally_on_engines(comm::Communicator& ranks, const Config& zero) {
  std::shared_ptr<comm::Communicator> alone;
  for (int rank = 0; rank < ranks.size(); ++rank) {
    const auto group = ranks.new_group({rank}, "local" + std::to_string(rank));
    if (group) alone = group;
  }
  nn::Sequential net = local_net();
  const auto engine = initialize({.model = net.ptr(), .config = adamw_config(zero), .communicator = alone}).engine;
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const at::Tensor loss = local_loss(net, part_of(local_batch(step), ranks));
    engine->backward(loss);
    engine->step();
    losses.push_back(loss.item<double>());
    if (step % kLocalSteps != kLocalSteps - 1 || ranks.size() == 1) continue;
    const torch::NoGradGuard no_grad;
    for (const at::Tensor& parameter : net->parameters()) {
      const at::Tensor mean = parameter / ranks.size();
      ranks.all_reduce(mean, comm::ReduceOp::kSum, "average of local models").wait();
      parameter.copy_(mean);
    }
  }
  losses.push_back(sum_of_weights(*net));
  return losses;
}

}  // namespace

std::vector<Program> inner_loop_programs() {
  constexpr double kSolvedInDoubles = 1e-10;  // a Cholesky factor has the condition of its matrix
  return {written_once("SharpnessAware", train_by_sharpness),
          written_once("Energy", train_energy),
          written_once("QLearning", train_q),
          written_once("Kernel", train_kernel, kSolvedInDoubles),
          {.name = "LocalSteps",
           .train_plainly = train_locally_in_plain_loops,
           .train_on_engine = train_locally_on_engines}};
}

}  // namespace ds::engine
