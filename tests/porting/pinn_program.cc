// A physics-informed network: u'' = -pi^2 sin(pi x) with u(0) = u(1) = 0, whose second derivative is autograd's.
#include <cmath>

#include "tests/model/small_run.h"
#include "tests/porting/programs.h"

namespace ds::engine {
namespace {

constexpr at::ScalarType kDtype = at::kDouble;

struct Field {
  Field() {
    net->to(kDtype);
    draw_weights(*net, 7);
  }
  torch::nn::Sequential net{torch::nn::Linear(1, 24), torch::nn::Tanh(), torch::nn::Linear(24, 24), torch::nn::Tanh(),
                            torch::nn::Linear(24, 1)};
};

at::Tensor derivative(const at::Tensor& of, const at::Tensor& by) {
  return torch::autograd::grad({of}, {by}, {torch::ones_like(of)}, /*retain_graph=*/true, /*create_graph=*/true)[0];
}

at::Tensor inner_points(int step) {
  at::Generator generator = generator_of(7000 + static_cast<uint64_t>(step));
  return torch::rand({2 * kGlobalBatch, 1}, generator, torch::kDouble).to(kDtype);
}

at::Tensor loss_of(Field& field, const at::Tensor& points) {
  const at::Tensor x = points.clone().requires_grad_(true);
  const at::Tensor u = field.net->forward(x);
  const at::Tensor u_xx = derivative(derivative(u, x), x);
  const at::Tensor residual = u_xx + M_PI * M_PI * torch::sin(M_PI * x);
  const at::Tensor edges = torch::tensor({0.0, 1.0}, torch::kDouble).view({2, 1}).to(kDtype);
  return residual.pow(2).mean() + 10 * field.net->forward(edges).pow(2).mean();
}

Losses train_pinn_plainly(int /*world*/) {
  Field field;
  torch::optim::AdamW optimizer(field.net->parameters(), adamw_options());
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = loss_of(field, inner_points(step));
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

Losses train_pinn_on_engine(comm::Communicator& communicator, const Config& zero) {
  Field field;
  const auto engine = start(field.net.ptr(), adamw_config(zero), communicator).engine;
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const at::Tensor loss = loss_of(field, part_of(inner_points(step), communicator));
    engine->backward(loss);
    engine->step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

}  // namespace

Program pinn() {
  return {
      .name = "Pinn", .tolerance = 1e-12, .train_plainly = train_pinn_plainly, .train_on_engine = train_pinn_on_engine};
}

}  // namespace ds::engine
