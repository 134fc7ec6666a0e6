// A small model of float64, trained by the engine and by plain LibTorch.
#pragma once

#include <utility>
#include <vector>

#include "tests/porting/ported_run.h"

namespace ds::engine {

// Rounding of one sum in two orders, in float64.
constexpr double kSameDouble = 1e-12;

inline SmallNet double_net() {
  SmallNet model;
  model->to(torch::kDouble);
  fill(*model);  // again: with all digits
  return model;
}

inline PortedResult run_plainly(const TorchRun& run, SmallNet& model, torch::optim::Optimizer& optimizer,
                                double limit) {
  PortedResult result;
  for (int step = 0; step < run.steps; ++step) {
    optimizer.zero_grad();
    double loss = 0;
    for (int micro = step * run.accumulation; micro < (step + 1) * run.accumulation; ++micro) {
      for (int rank = 0; rank < run.world; ++rank) {
        const at::Tensor part = model->loss(sample(micro, rank)) / static_cast<double>(run.accumulation * run.world);
        part.backward();
        loss += part.item<double>();
      }
    }
    if (limit > 0) torch::nn::utils::clip_grad_norm_(model->parameters(), limit);
    optimizer.step();
    result.losses.push_back(loss);
  }
  result.weights = parameters_of(*model);
  return result;
}

// `steps` steps from the batches of step `first` on; every rank has the result.
inline PortedResult train_double(Engine& engine, SmallNet& model, comm::Communicator& ranks, int steps, int first = 0) {
  PortedResult result;
  const int accumulation = static_cast<int>(engine.gradient_accumulation_steps());
  for (int step = first; step < first + steps; ++step) {
    double loss = 0;
    for (int micro = step * accumulation; micro < (step + 1) * accumulation; ++micro) {
      const at::Tensor own = model->loss(sample(micro, ranks.rank()));
      engine.backward(own);
      engine.step();
      loss += mean_over(ranks, own.item<double>()) / accumulation;
    }
    result.losses.push_back(loss);
  }
  result.weights = copy_of(engine.fp32_state_dict());
  return result;
}

}  // namespace ds::engine
