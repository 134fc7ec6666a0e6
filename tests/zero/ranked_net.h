// A small network on each rank whose gradients a GradientReducer reduces, and what plain autograd gives for it.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/comm.h"
#include "zero/reduction/gradient_reducer.h"

namespace ds::test {

// A network whose rank-dependent input decides which branch gets gradients.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(7, 9));
    left = register_module("left", torch::nn::Linear(9, 5));
    right = register_module("right", torch::nn::Linear(9, 5));
    last = register_module("last", torch::nn::Linear(5, 1));
  }
  at::Tensor forward(const at::Tensor& x, bool go_left) {
    const at::Tensor h = torch::tanh(first(x));
    return last(go_left ? left(h) : right(h)).sum();
  }
  torch::nn::Linear first{nullptr}, left{nullptr}, right{nullptr}, last{nullptr};
};
TORCH_MODULE(Net);

inline std::vector<zero::Parameter> parameters_of(const torch::nn::Module& module) {
  std::vector<zero::Parameter> result;
  for (const auto& item : module.named_parameters()) result.push_back({item.key(), item.value()});
  return result;
}

// torch's global generator is shared by rank threads: values come from a formula instead.
inline void fill(const std::vector<zero::Parameter>& parameters) {
  torch::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor flat = parameters[i].tensor.view(-1);
    flat.copy_(torch::sin(torch::arange(flat.numel(), torch::kFloat) * 0.7 + static_cast<double>(i)) * 0.5);
  }
}

inline at::Tensor input(int rank, int pass) {
  return torch::cos(torch::arange(21, torch::kFloat) + rank * 3 + pass).view({3, 7});
}

struct Ranked {
  Ranked(comm::Communicator& slices, zero::ReducerOptions options, int64_t max_bucket)
      : Ranked(zero::ReduceRoutes{slices}, options, max_bucket) {}
  Ranked(zero::ReduceRoutes routes, zero::ReducerOptions options, int64_t max_bucket) {
    parameters = parameters_of(*net);
    fill(parameters);
    std::vector<zero::LayoutParameter> shapes;
    for (const zero::Parameter& parameter : parameters) shapes.push_back({parameter.name, parameter.tensor.numel()});
    for (zero::BucketLayout& layout :
         zero::lay_out(shapes, {.world_size = routes.slices.size(), .max_bucket_elements = max_bucket})) {
      const at::Tensor values = zero::flatten(layout, parameters, at::kFloat);
      buckets.emplace_back(std::move(layout), parameters, values, at::kFloat);
    }
    reducer = std::make_unique<zero::GradientReducer>(buckets, parameters, routes, options);
  }

  void backward(int rank, int pass, bool synchronize, bool boundary, bool go_left, std::vector<char> in_pass = {}) {
    reducer->begin_backward(synchronize, boundary, std::move(in_pass));
    net->forward(input(rank, pass), go_left).backward();
    reducer->end_backward();
  }

  Net net;
  std::vector<zero::Parameter> parameters;
  std::vector<zero::ParameterBucket> buckets;
  std::unique_ptr<zero::GradientReducer> reducer;
};

// What plain autograd gives for the same passes, averaged over ranks.
inline std::map<std::string, at::Tensor> expected(int world, const std::vector<std::pair<int, bool>>& passes,
                                                  bool average) {
  Net net;
  auto parameters = parameters_of(*net);
  fill(parameters);
  for (int rank = 0; rank < world; ++rank) {
    for (const auto& [pass, mixed] : passes) {
      const bool go_left = !mixed || rank == 0;
      at::Tensor loss = net->forward(input(rank, pass), go_left);
      (average ? loss / world : loss).backward();
    }
  }
  std::map<std::string, at::Tensor> result;
  for (const zero::Parameter& parameter : parameters) {
    result[parameter.name] =
        parameter.tensor.grad().defined() ? parameter.tensor.grad() : torch::zeros_like(parameter.tensor);
  }
  return result;
}

inline void expect_gradients(const Ranked& ranked, int rank, const std::map<std::string, at::Tensor>& wanted,
                             bool whole, double tolerance = 1e-6) {
  for (size_t b = 0; b < ranked.buckets.size(); ++b) {
    const at::Tensor got = ranked.reducer->gradient(b);
    const zero::BucketLayout& layout = ranked.buckets[b].layout();
    ASSERT_TRUE(got.defined());
    ASSERT_EQ(got.numel(), whole ? layout.numel : layout.slice_numel);
    for (const Segment& segment : whole ? layout.segments : zero::slice_segments(layout, rank)) {
      const at::Tensor want = wanted.at(ranked.parameters[static_cast<size_t>(segment.parameter)].name)
                                  .reshape(-1)
                                  .narrow(0, segment.parameter_offset, segment.length);
      const at::Tensor have = got.narrow(0, segment.slice_offset, segment.length).to(at::kFloat);
      EXPECT_TRUE(torch::allclose(have, want, tolerance, tolerance))
          << "bucket " << b << " parameter " << segment.parameter;
    }
  }
}

}  // namespace ds::test
