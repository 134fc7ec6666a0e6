// A network that learns the steps of a solver, in float64, and the solver.
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <cstdint>

#include "tests/porting/programs.h"

namespace ds::engine {

constexpr int64_t kPoints = 12;

struct SurrogateImpl : torch::nn::Module {
  explicit SurrogateImpl(int64_t fields) {
    using torch::nn::Linear;
    net = register_module("net", torch::nn::Sequential(Linear(kPoints, 24), torch::nn::Tanh(), Linear(24, kPoints)));
    field = register_buffer("field", torch::zeros({fields, kPoints}));
    draw_weights(*this, 31);
    to(torch::kDouble);
  }
  at::Tensor forward(const at::Tensor& u) { return u + 0.1 * net->forward(u); }
  torch::nn::Sequential net;
  at::Tensor field;  // the solver's, of this rank
};
TORCH_MODULE(Surrogate);

inline at::Tensor solve(at::Tensor u, int64_t step) {
  for (int i = 0; i < 5; ++i) {
    u = u + 0.2 * (u.roll(1, 1) + u.roll(-1, 1) - 2 * u) + 0.01 * std::sin(0.1 * static_cast<double>(step));
  }
  return u;
}

}  // namespace ds::engine
