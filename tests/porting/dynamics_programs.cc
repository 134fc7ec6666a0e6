// Programs about systems that move: PPO on pendulums, a network beside a solver, a neural ODE with its adjoint,
// truncated backpropagation through time, and a network that is the fixed point of a step.
#include <memory>
#include <utility>
#include <vector>

#include "tests/porting/surrogate.h"
#include "tests/porting/trainer.h"

namespace ds::engine {
namespace {

namespace nn = torch::nn;

// --- PPO: an actor and a critic with an engine each, GAE, several epochs over a rollout, a stop by the divergence ---

constexpr int64_t kPendulums = 8;
constexpr int64_t kRollout = 12;
constexpr int kIterations = 4;
constexpr int kEpochs = 3;
constexpr int64_t kParts = 2;  // of a rollout, in an epoch

struct ActorImpl : nn::Module {
  ActorImpl() {
    body = register_module("body", nn::Sequential(nn::Linear(3, 24), nn::Tanh(), nn::Linear(24, 1)));
    draw_weights(*this, 21);
    log_std = register_parameter("log_std", torch::full({1}, -0.5));
  }
  at::Tensor log_chance(const at::Tensor& states, const at::Tensor& actions) {
    const at::Tensor z = (actions - body->forward(states)) / log_std.exp();
    return (-0.5 * z * z - log_std).sum(-1);
  }
  nn::Sequential body;
  at::Tensor log_std;
};
TORCH_MODULE(Actor);

struct Pendulums {
  at::Tensor states() const { return torch::stack({angle.cos(), angle.sin(), speed}, 1); }
  at::Tensor step(const at::Tensor& action) {
    const at::Tensor reward = -(1 - angle.cos()) - 0.1 * speed * speed;
    speed = (speed + 0.05 * (5 * angle.sin() + 3 * action.squeeze(1).clamp(-2, 2))).clamp(-4, 4);
    angle = angle + 0.05 * speed;
    return reward;
  }
  at::Tensor angle, speed;  // [pendulums]
};

struct Rollout {
  at::Tensor states, actions, chances, advantages, returns;  // [time, pendulums, ...]
};

Rollout play(Actor& actor, nn::Sequential& critic, Pendulums& world, const at::Tensor& noise, const Trainer& trainer) {
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> states, actions, rewards, values;
  for (int64_t t = 0; t < kRollout; ++t) {
    states.push_back(world.states());
    actions.push_back(actor->body->forward(states.back()) + actor->log_std.exp() * noise[t]);
    values.push_back(critic->forward(states.back()).squeeze(1));
    rewards.push_back(world.step(actions.back()));
  }
  at::Tensor next = critic->forward(world.states()).squeeze(1);
  at::Tensor last = torch::zeros_like(next);
  std::vector<at::Tensor> advantages(kRollout);
  for (int64_t t = kRollout - 1; t >= 0; --t) {
    last = rewards[t] + 0.99 * next - values[t] + 0.99 * 0.95 * last;
    advantages[t] = last;
    next = values[t];
  }
  Rollout rollout{.states = torch::stack(states), .actions = torch::stack(actions)};
  rollout.chances = actor->log_chance(rollout.states, rollout.actions);
  const at::Tensor advantage = torch::stack(advantages);
  rollout.returns = advantage + torch::stack(values);
  const at::Tensor mean = trainer.mean(advantage.mean());  // over all pendulums
  const at::Tensor spread = (trainer.mean(advantage.pow(2).mean()) - mean * mean).sqrt();
  rollout.advantages = (advantage - mean) / (spread + 1e-8);
  return rollout;
}

Losses train_ppo(const Trainer& trainer) {
  Actor actor;
  nn::Sequential critic(nn::Linear(3, 24), nn::Tanh(), nn::Linear(24, 1));
  draw_weights(*critic, 22);
  const auto falling = [](int64_t update) { return 1.0 - 0.03 * static_cast<double>(update); };
  const auto actor_model = trainer.train(actor.ptr(), {.lr = 3e-3, .clip_norm = 0.5, .lr_factor = falling});
  const auto critic_model = trainer.train(critic.ptr(), {.optimizer = std::make_shared<torch::optim::Adam>(
                                                             critic->parameters(), torch::optim::AdamOptions(5e-3))});
  Pendulums world{.angle = trainer.part(normal({kPendulums}, 23)), .speed = trainer.part(normal({kPendulums}, 24))};
  Losses losses;
  for (int iteration = 0; iteration < kIterations; ++iteration) {
    const at::Tensor noise = normal({kRollout, kPendulums, 1}, 2500 + iteration);
    const Rollout rollout = play(actor, critic, world, trainer.part(noise.transpose(0, 1)).transpose(0, 1), trainer);
    bool far = false;
    for (int epoch = 0; epoch < kEpochs && !far; ++epoch) {
      for (const at::Tensor& times : uniform({kRollout}, 2600 + 10 * iteration + epoch).argsort().chunk(kParts)) {
        const auto some = [&](const at::Tensor& all) { return all.index_select(0, times); };
        const at::Tensor ratio =
            (actor->log_chance(some(rollout.states), some(rollout.actions)) - some(rollout.chances)).exp();
        const at::Tensor gain = some(rollout.advantages);
        const at::Tensor policy_loss =
            -torch::min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() - 0.01 * actor->log_std.sum();
        const at::Tensor values = critic->forward(some(rollout.states)).squeeze(-1);
        const at::Tensor value_loss = (values - some(rollout.returns)).pow(2).mean();
        actor_model->backward(policy_loss);
        critic_model->backward(value_loss);
        actor_model->step();
        critic_model->step();
        losses.insert(losses.end(), {policy_loss.item<double>(), value_loss.item<double>()});
      }
      const torch::NoGradGuard no_grad;  // one decision of all ranks
      const at::Tensor moved = (rollout.chances - actor->log_chance(rollout.states, rollout.actions)).mean();
      far = trainer.mean(moved).item<double>() > 0.01;
    }
  }
  losses.push_back(sum_of_weights(*actor) + sum_of_weights(*critic));
  return losses;
}

// --- a surrogate of a solver, in float64 with the program's Adam and torch's StepLR ---------------------------------

Losses train_surrogate(const Trainer& trainer) {
  Surrogate net(kGlobalBatch / trainer.world());
  const auto adam = std::make_shared<torch::optim::Adam>(net->parameters(), torch::optim::AdamOptions(2e-3));
  torch::optim::StepLR schedule(*adam, 4, 0.5);
  const auto model = trainer.train(net.ptr(), {.clip_norm = 1.0, .optimizer = adam});
  {
    const torch::NoGradGuard no_grad;
    net->field.copy_(trainer.part(normal({kGlobalBatch, kPoints}, 32).to(torch::kDouble)));
  }
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const at::Tensor u = net->field.clone();
    const at::Tensor target = solve(u, step);
    const at::Tensor loss = torch::mse_loss(net->forward(u), target);
    model->backward(loss);
    model->step();
    schedule.step();
    const torch::NoGradGuard no_grad;
    net->field.copy_(target);
    losses.push_back(loss.item<double>());
  }
  losses.push_back(sum_of_weights(*net));
  return losses;
}

// --- a neural ODE whose adjoint is an autograd function that calls autograd -----------------------------------------

constexpr int kOdeSteps = 4;

struct SlopeImpl : nn::Module {
  SlopeImpl() {
    net = register_module("net", nn::Sequential(nn::Linear(2, 24), nn::Tanh(), nn::Linear(24, 2)));
    draw_weights(*this, 41);
  }
  at::Tensor midpoint_step(const at::Tensor& z) {
    constexpr double kStep = 1.0 / kOdeSteps;
    return z + kStep * net->forward(z + 0.5 * kStep * net->forward(z));
  }
  nn::Sequential net;
};
TORCH_MODULE(Slope);

// Keeps the states, and the graph of one step at a time.
struct Adjoint : torch::autograd::Function<Adjoint> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, SlopeImpl* slope, const at::Tensor& start,
                            const at::Tensor& /*weight*/, const at::Tensor& /*bias*/, const at::Tensor& /*weight*/,
                            const at::Tensor& /*bias*/) {
    const torch::NoGradGuard no_grad;
    torch::autograd::variable_list states{start};
    for (int i = 0; i < kOdeSteps; ++i) states.push_back(slope->midpoint_step(states.back()));
    context->save_for_backward(states);
    context->saved_data["slope"] = reinterpret_cast<int64_t>(slope);
    return states.back().clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    auto* const slope = reinterpret_cast<SlopeImpl*>(context->saved_data["slope"].toInt());
    const torch::autograd::variable_list states = context->get_saved_variables();
    torch::autograd::variable_list inputs{at::Tensor()};
    for (const at::Tensor& parameter : slope->parameters()) inputs.push_back(parameter);
    torch::autograd::variable_list sums{gradients[0]};
    for (size_t i = 1; i < inputs.size(); ++i) sums.push_back(torch::zeros_like(inputs[i]));
    for (int step = kOdeSteps - 1; step >= 0; --step) {
      const torch::AutoGradMode with_graph(true);
      inputs[0] = states[static_cast<size_t>(step)].detach().requires_grad_();
      const auto found = torch::autograd::grad({slope->midpoint_step(inputs[0])}, inputs, {sums[0]});
      sums[0] = found[0];
      for (size_t i = 1; i < sums.size(); ++i) sums[i] = sums[i] + found[i];
    }
    sums.insert(sums.begin(), at::Tensor());  // of the module
    return sums;
  }
};

Losses train_neural_ode(const Trainer& trainer) {
  Slope slope;
  const auto model = trainer.train(slope.ptr(), {.lr = 3e-3});
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const at::Tensor start = trainer.part(normal({kGlobalBatch, 2}, 4200 + step));
    const at::Tensor end = torch::stack({-start.select(1, 1), start.select(1, 0)}, 1);
    const std::vector<at::Tensor> p = slope->parameters();
    const at::Tensor loss = torch::mse_loss(Adjoint::apply(slope.get(), start, p[0], p[1], p[2], p[3]), end);
    model->backward(loss);
    model->step();
    losses.push_back(loss.item<double>());
  }
  losses.push_back(sum_of_weights(*slope));
  return losses;
}

// --- truncated backpropagation through time: the hidden state goes on between steps ---------------------------------

constexpr int64_t kStateSize = 16;
constexpr int64_t kTimes = 6;

struct MemoryImpl : nn::Module {
  explicit MemoryImpl(int64_t batch) {
    rnn = register_module("rnn", nn::GRU(2, kStateSize));
    out = register_module("out", nn::Linear(kStateSize, 2));
    hidden = register_buffer("hidden", torch::zeros({1, batch, kStateSize}));
    draw_weights(*this, 51);
  }
  at::Tensor loss(const at::Tensor& signal) {  // [time + 1, batch, 2]
    const auto [outputs, last] = rnn->forward(signal.slice(0, 0, kTimes), hidden.clone());
    hidden.copy_(last.detach());
    return torch::mse_loss(out(outputs), signal.slice(0, 1));
  }
  nn::GRU rnn{nullptr};
  nn::Linear out{nullptr};
  at::Tensor hidden;
};
TORCH_MODULE(Memory);

Losses train_tbptt(const Trainer& trainer) {
  Memory net(kGlobalBatch / trainer.world());
  const auto sgd = std::make_shared<torch::optim::SGD>(
      net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9).nesterov(true).weight_decay(1e-4));
  torch::optim::ReduceLROnPlateauScheduler plateau(*sgd, torch::optim::ReduceLROnPlateauScheduler::min, 0.5, 1);
  const auto model = trainer.train(net.ptr(), {.clip_norm = 1.0, .optimizer = sgd});
  const at::Tensor phase = trainer.part(6.28 * uniform({kGlobalBatch}, 52));
  const auto signal = [&](int step) {
    const at::Tensor time = 0.3 * (torch::arange(kTimes + 1).unsqueeze(1) + step * kTimes).to(torch::kFloat);
    return torch::stack({(time + phase).sin(), (2 * time + phase).cos()}, 2);
  };
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const at::Tensor loss = net->loss(signal(step));
    model->backward(loss);
    model->step();
    losses.push_back(loss.item<double>());
    if (step % 3 != 2) continue;
    const torch::NoGradGuard no_grad;  // validation has a hidden state of its own
    const at::Tensor kept = net->hidden.clone();
    net->hidden.zero_();
    const double validation = trainer.mean(net->loss(signal(0))).item<double>();
    net->hidden.copy_(kept);
    plateau.step(validation + step);  // as if it rose
    losses.insert(losses.end(), {validation, sgd->param_groups()[0].options().get_lr()});
  }
  losses.push_back(sum_of_weights(*net));
  return losses;
}

// --- an equilibrium network: a fixed point, its gradient by another one, and a spectral norm by power iterations ----

// The result of `step` again and again until it stands still; each rank needs its own number of steps.
template <class Step>
at::Tensor fixed_point(at::Tensor z, const Step& step) {
  constexpr int kMostSteps = 200;
  for (int i = 0; i < kMostSteps; ++i) {
    const at::Tensor last = std::exchange(z, step(z));
    if ((z - last).abs().max().item<double>() <= 1e-13 * z.abs().max().item<double>()) break;
  }
  return z;
}

struct EquilibriumImpl : nn::Module {
  EquilibriumImpl() {
    inject = register_module("inject", nn::Linear(3, 8));
    weight = register_parameter("weight", torch::zeros({8, 8}));
    out = register_module("out", nn::Linear(8, 1));
    direction = register_buffer("direction", torch::ones({8}));
    draw_weights(*this, 251);
    to(torch::kDouble);
  }
  // The weight with a largest singular value of about 0.5, by one more power iteration.
  at::Tensor contraction() {
    at::Tensor left;
    {
      const torch::NoGradGuard no_grad;
      left = nn::functional::normalize(weight.matmul(direction), nn::functional::NormalizeFuncOptions().dim(0));
      direction.copy_(
          nn::functional::normalize(weight.t().matmul(left), nn::functional::NormalizeFuncOptions().dim(0)));
    }
    return weight * (0.5 / left.dot(weight.matmul(direction.clone())));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor matrix = contraction();
    const at::Tensor injected = inject(x);
    const auto next = [&](const at::Tensor& z) { return torch::tanh(torch::linear(z, matrix) + injected); };
    at::Tensor z;
    {
      const torch::NoGradGuard no_grad;
      z = fixed_point(torch::zeros_like(injected), next);
    }
    const at::Tensor begin = z.detach().requires_grad_();
    const at::Tensor end = next(begin);
    const at::Tensor result = next(z.detach());
    result.register_hook([begin, end](const at::Tensor& gradient) {
      return fixed_point(gradient, [&](const at::Tensor& sum) {
        return gradient + torch::autograd::grad({end}, {begin}, {sum}, /*retain_graph=*/true)[0];
      });
    });
    return out(result);
  }
  nn::Linear inject{nullptr}, out{nullptr};
  at::Tensor weight, direction;
};
TORCH_MODULE(Equilibrium);

Losses train_equilibrium(const Trainer& trainer) {
  Equilibrium net;
  const auto model = trainer.train(net.ptr(), {.lr = 1e-2});
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const at::Tensor x =
        trainer.part(normal({kGlobalBatch, 3}, 25200 + static_cast<uint64_t>(step))).to(torch::kDouble);
    const at::Tensor loss = torch::mse_loss(net->forward(x), x.prod(1, true));
    model->backward(loss);
    model->step();
    losses.push_back(loss.item<double>());
  }
  losses.push_back(net->direction.abs().sum().item<double>());
  losses.push_back(sum_of_weights(*net));
  return losses;
}

}  // namespace

std::vector<Program> dynamics_programs() {
  // The bound of PPO is wide because its rollouts are chaotic: rounding of the weights, 1e-7, moves the pendulums, and
  // every later loss is taken where they have come to. One rank differs from the plain loop by as much.
  constexpr double kChaotic = 1e-4;
  constexpr double kSameDoubles = 1e-12;
  constexpr double kSolved = 1e-10;  // ranks end their iterations at different steps
  return {written_once("Ppo", train_ppo, kChaotic), written_once("Surrogate", train_surrogate, kSameDoubles),
          written_once("NeuralOde", train_neural_ode), written_once("Tbptt", train_tbptt),
          written_once("Equilibrium", train_equilibrium, kSolved)};
}

}  // namespace ds::engine
