// One BatchNorm over parts of a batch on several ranks, beside LibTorch's on the joined batch in float64.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

#include "dsengine/sync_batch_norm.h"
#include "tests/support/thread_ranks.h"

namespace ds::test {

// The largest difference, as a part of the largest value.
inline double difference(const at::Tensor& found, const at::Tensor& expected) {
  if (expected.numel() == 0) return found.sizes() == expected.sizes() ? 0 : 1;
  if (found.sizes() != expected.sizes()) return 1e30;
  const double largest = std::max(1e-30, expected.to(at::kDouble).abs().max().item<double>());
  return (found.to(at::kDouble) - expected.to(at::kDouble)).abs().max().item<double>() / largest;
}

struct NormCase {
  std::vector<int64_t> batches;    // of the ranks
  std::vector<int64_t> positions;  // sizes after [N, C]
  at::ScalarType type = at::kFloat;
  bool affine = true;
  bool track = true;
  std::optional<double> momentum = 0.1;
  double offset = 0;  // of the input: statistics far from zero
  int64_t channels = 3;
  int steps = 2;
  double tolerance = 1e-6;

  int64_t total() const { return std::accumulate(batches.begin(), batches.end(), int64_t{0}); }
  torch::nn::BatchNormOptions options() const {
    return torch::nn::BatchNormOptions(channels).affine(affine).track_running_stats(track).momentum(momentum);
  }
  // Drawn in float64 and rounded to `type`, the same for any number of ranks.
  at::Tensor draw(int seed) const {
    std::vector<int64_t> sizes{total(), channels};
    sizes.insert(sizes.end(), positions.begin(), positions.end());
    auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
    return torch::randn(sizes, generator, torch::kDouble).to(type);
  }
  at::Tensor input(int step) const { return (draw(step + 1) * 2 + offset).to(type); }
  at::Tensor part(const at::Tensor& whole, int rank) const {
    const int64_t begin = std::accumulate(batches.begin(), batches.begin() + rank, int64_t{0});
    return whole.narrow(0, begin, batches[static_cast<size_t>(rank)]);
  }
  template <class Norm>
  Norm layer(at::ScalarType of) const {
    Norm norm(options());
    if (affine) {
      const at::NoGradGuard no_graph;
      norm->weight.copy_(torch::linspace(0.5, 2, channels));
      norm->bias.copy_(torch::linspace(-1, 1, channels));
    }
    norm->to(of);
    return norm;
  }
};

struct NormRun {
  std::vector<at::Tensor> outputs, input_gradients;  // of the steps
  at::Tensor weight_gradient, bias_gradient, running_mean, running_var, counted;
};

// `steps` passes: forward of the inputs, gradients that are drawn, backward. `of(whole)`: what this process has of it.
template <class Norm, class Forward, class Part>
NormRun run_norm(const NormCase& given, Norm& norm, const Part& of, at::ScalarType type, const Forward& forward) {
  NormRun run;
  for (int step = 0; step < given.steps; ++step) {
    const at::Tensor input = of(given.input(step)).detach().to(type).clone().requires_grad_(true);
    const at::Tensor output = forward(norm, input);
    output.backward(of(given.draw(100 + step)).to(type));
    run.outputs.push_back(output.detach());
    run.input_gradients.push_back(input.grad());
  }
  if (given.affine) {
    run.weight_gradient = norm->weight.grad();
    run.bias_gradient = norm->bias.grad();
  }
  run.running_mean = norm->running_mean;
  run.running_var = norm->running_var;
  run.counted = norm->num_batches_tracked;
  return run;
}

struct PlainForward {
  template <class Norm>
  at::Tensor operator()(Norm& norm, const at::Tensor& input) const {
    return norm->forward(input);
  }
};

// Compares; `forward` is how ranks call the layer.
template <class Norm, class Forward = PlainForward>
void expect_as_joined(const NormCase& given, const Forward& forward = {}) {
  Norm whole = given.layer<Norm>(at::kDouble);
  const NormRun expected = run_norm(
      given, whole, [](const at::Tensor& all) { return all; }, at::kDouble, PlainForward());
  run_ranks(static_cast<int>(given.batches.size()), [&](comm::Communicator& ranks) {
    Norm norm = given.layer<Norm>(given.type);
    EXPECT_EQ(convert_sync_batchnorm(*norm, ranks), std::vector<std::string>{"itself"});
    const auto own = [&](const at::Tensor& all) { return given.part(all, ranks.rank()); };
    const NormRun found = run_norm(given, norm, own, given.type, forward);
    for (size_t step = 0; step < found.outputs.size(); ++step) {
      EXPECT_LE(difference(found.outputs[step], own(expected.outputs[step])), given.tolerance);
      EXPECT_LE(difference(found.input_gradients[step], own(expected.input_gradients[step])), given.tolerance);
      EXPECT_EQ(found.outputs[step].scalar_type(), given.type);
    }
    if (given.affine) {
      for (const auto& [own_gradient, joined] : {std::pair(found.weight_gradient, expected.weight_gradient),
                                                 std::pair(found.bias_gradient, expected.bias_gradient)}) {
        at::Tensor sum = own_gradient.clone();
        ranks.all_reduce(sum).wait();
        EXPECT_LE(difference(sum, joined), given.tolerance);
      }
    }
    if (given.track) {
      EXPECT_LE(difference(found.running_mean, expected.running_mean), given.tolerance);
      EXPECT_LE(difference(found.running_var, expected.running_var), given.tolerance);
      EXPECT_EQ(found.counted.template item<int64_t>(), expected.counted.template item<int64_t>());
    }
  });
}

}  // namespace ds::test
