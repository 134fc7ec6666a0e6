// A small network on each rank, and the same one trained by plain torch on the batches of all ranks.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dsengine/distributed_data_parallel.h"
#include "tests/support/thread_ranks.h"

namespace ds::test {

// Three layers; with `branches` a rank decides which of two it runs through.
struct ToyImpl : torch::nn::Module {
  explicit ToyImpl(int64_t width = 9) {
    first = register_module("first", torch::nn::Linear(7, width));
    left = register_module("left", torch::nn::Linear(width, 5));
    right = register_module("right", torch::nn::Linear(width, 5));
    last = register_module("last", torch::nn::Linear(5, 2));
    fill();
  }
  // torch's generator is shared by the threads of ranks: values come from a formula.
  void fill(double phase = 0) {
    const torch::NoGradGuard no_grad;
    double offset = phase;
    for (at::Tensor& parameter : parameters()) {
      parameter.copy_(
          (torch::sin(torch::arange(parameter.numel(), torch::kFloat) * 0.7 + offset) * 0.4).view(parameter.sizes()));
      offset += 1;
    }
  }
  at::Tensor forward(const at::Tensor& x, const std::string& way = "both") {
    const at::Tensor h = torch::tanh(first(x));
    if (way == "left") return last(left(h));
    if (way == "right") return last(right(h));
    return last(torch::tanh(left(h)) * right(h));
  }
  std::vector<torch::nn::Linear> layers() { return {first, left, right, last}; }
  torch::nn::Linear first{nullptr}, left{nullptr}, right{nullptr}, last{nullptr};
};
TORCH_MODULE(Toy);

inline at::Tensor batch_of(int rank, int step) {
  return torch::cos(torch::arange(28, torch::kFloat) * 0.37 + rank * 3 + step * 1.7).view({4, 7});
}

inline at::Tensor loss_of(const at::Tensor& y) { return (y - 0.3).pow(2).mean(); }

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

// The optimizers that loops are tried with; torch_ddp.py has the same.
inline const std::map<std::string, MakeOptimizer>& optimizers() {
  using namespace torch::optim;  // NOLINT(google-build-using-namespace): the names of the table
  static const std::map<std::string, MakeOptimizer> kAll = {
      {"SGD", [](auto p) { return std::make_unique<SGD>(p, SGDOptions(0.1).momentum(0.9).nesterov(true)); }},
      {"Adam", [](auto p) { return std::make_unique<Adam>(p, AdamOptions(0.01)); }},
      {"AdamW", [](auto p) { return std::make_unique<AdamW>(p, AdamWOptions(0.01).weight_decay(0.1)); }},
      {"RMSprop", [](auto p) { return std::make_unique<RMSprop>(p, RMSpropOptions(0.003).momentum(0.5)); }},
      {"Adagrad", [](auto p) { return std::make_unique<Adagrad>(p, AdagradOptions(0.05)); }}};
  return kAll;
}

// A group that outlives whoever shares it.
inline std::shared_ptr<comm::Communicator> shared(comm::Communicator& group) {
  return {std::shared_ptr<void>(), &group};
}

// Buckets of one or two parameters, so that there are several.
inline DistributedDataParallelOptions small_buckets(comm::Communicator& group) {
  return {.process_group = shared(group), .bucket_cap_mb = 3e-4, .first_bucket_mb = 1e-4};
}

inline void expect_close(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& wanted, double tolerance,
                         const std::string& where) {
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i].defined(), wanted[i].defined()) << where << ", tensor " << i;
    if (!found[i].defined()) continue;
    const double scale = std::max(1.0, wanted[i].abs().max().item<double>());
    EXPECT_LE((found[i] - wanted[i]).abs().max().item<double>(), tolerance * scale) << where << ", tensor " << i;
  }
}

inline std::vector<at::Tensor> gradients_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& parameter : module.parameters()) {
    result.push_back(parameter.grad().defined() ? parameter.grad().detach().clone() : at::Tensor());
  }
  return result;
}

inline std::vector<at::Tensor> values_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& parameter : module.parameters()) result.push_back(parameter.detach().clone());
  return result;
}

}  // namespace ds::test
