// The operators of dsengine/ops.h beside the chains of LibTorch's operators that they replace, on the CPU or a GPU.
//
//   fused_ops_bench [--rows 2048] [--size 1024] [--heads 16] [--pairs 15] [--threads 1] [--only NAME] [--device cuda]
//
// Each runs in turn with its chain on the same tensors; printed are medians of forward, and of forward and backward,
// the median of the ratios of neighbours (below 1: the operator is faster), and between which quartiles these lie (the
// noise). Checked: results and gradients agree with the chain's in float32. On a GPU a run is kRepeats of them in a
// row, then waited for; forward with backward is bound by the host there at small sizes.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "benchmarks/paired_timing.h"
#include "comm/job/rank_device.h"
#include "core/check.h"
#include "dsengine/ops.h"

namespace {

constexpr int kRepeats = 20;

using ds::benchmarks::quantile;
using ds::benchmarks::seconds;
using Tensors = std::vector<at::Tensor>;
using Function = std::function<Tensors(const Tensors&)>;

struct Size {
  int64_t rows = 2048;
  int64_t size = 1024;
  int64_t heads = 16;
  at::Device device = at::kCPU;
};

struct Operator {
  std::string name;
  Tensors inputs;  // float32
  Function fused, chain;
};

Operator norm(const std::string& name, const Size& size, bool centered, bool with_residual) {
  const std::vector<int64_t> shape = {size.rows, size.size};
  Tensors inputs = {at::randn(shape), at::rand({size.size}) + 0.5};
  if (centered) inputs.push_back(at::randn({size.size}));
  if (with_residual) inputs.push_back(at::randn(shape));
  const auto fused = [=](const Tensors& in) -> Tensors {
    const at::Tensor bias = centered ? in[2] : at::Tensor();
    if (!with_residual) return {centered ? ds::ops::layer_norm(in[0], in[1], bias) : ds::ops::rms_norm(in[0], in[1])};
    const ds::ops::NormedSum made = centered ? ds::ops::add_layer_norm(in[0], in.back(), in[1], bias)
                                             : ds::ops::add_rms_norm(in[0], in.back(), in[1]);
    return {made.normed, made.sum};
  };
  const auto chain = [=](const Tensors& in) -> Tensors {
    const at::Tensor sum = with_residual ? in[0] + in.back() : in[0];
    const at::Tensor normed =
        centered ? at::layer_norm(sum, {size.size}, in[1], in[2], 1e-5) : at::rms_norm(sum, {size.size}, in[1], 1e-6);
    return with_residual ? Tensors{normed, sum} : Tensors{normed};
  };
  return {name, inputs, fused, chain};
}

Operator packed_swiglu(const Size& size) {
  return {"swiglu, packed",
          {at::randn({size.rows, 2 * size.size})},
          [](const Tensors& in) { return Tensors{ds::ops::swiglu(in[0])}; },
          [](const Tensors& in) {
            const Tensors halves = in[0].chunk(2, -1);
            return Tensors{at::silu(halves[0]) * halves[1]};
          }};
}

Operator swiglu(const Size& size) {
  return {"swiglu",
          {at::randn({size.rows, size.size}), at::randn({size.rows, size.size})},
          [](const Tensors& in) { return Tensors{ds::ops::swiglu(in[0], in[1])}; },
          [](const Tensors& in) { return Tensors{at::silu(in[0]) * in[1]}; }};
}

// RoPE on [1, positions, heads, channels], turned to [1, heads, positions, channels] as attention takes it.
Operator rope(const std::string& name, const Size& size, ds::ops::RopePairs pairs) {
  const int64_t channels = size.size / size.heads;
  const ds::ops::RopeTables tables = ds::ops::rope_tables(size.rows, channels, 10000.0, at::device(size.device));
  const auto fused = [=](const Tensors& in) {
    return Tensors{ds::ops::rope(in[0].transpose(1, 2), tables.cos, tables.sin, {.pairs = pairs})};
  };
  const auto chain = [=](const Tensors& in) {
    const at::Tensor x = in[0].transpose(1, 2);
    const at::Tensor cos = tables.cos.to(x.scalar_type());
    const at::Tensor sin = tables.sin.to(x.scalar_type());
    if (pairs == ds::ops::RopePairs::kHalves) {
      const Tensors halves = x.chunk(2, -1);
      return Tensors{at::cat({halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin}, -1)};
    }
    const at::Tensor a = x.slice(-1, 0, channels, 2);
    const at::Tensor b = x.slice(-1, 1, channels, 2);
    return Tensors{at::stack({a * cos - b * sin, b * cos + a * sin}, -1).flatten(-2)};
  };
  return {name, {at::randn({1, size.rows, size.heads, channels})}, fused, chain};
}

Tensors leaves_of(const Tensors& inputs, at::Device device, at::ScalarType type) {
  Tensors leaves;
  for (const at::Tensor& input : inputs) leaves.push_back(input.to(device, type).detach().requires_grad_(true));
  return leaves;
}

Tensors pass(const Function& function, const Tensors& leaves, const Tensors& cotangents) {
  return torch::autograd::grad(function(leaves), leaves, cotangents);
}

// LibTorch adds some gradients up in bfloat16: the truth is its chain in float32, on the same rounded numbers.
void check(const Operator& of, const Tensors& leaves, const Tensors& cotangents, at::ScalarType type) {
  const double allowed = type == at::kFloat ? 1e-5 : 3e-2;
  Tensors exact;
  Tensors exact_cotangents;
  for (const at::Tensor& leaf : leaves) exact.push_back(leaf.detach().to(at::kFloat).requires_grad_(true));
  for (const at::Tensor& cotangent : cotangents) exact_cotangents.push_back(cotangent.to(at::kFloat));
  const auto expect_same = [&](const Tensors& found, const Tensors& expected) {
    for (size_t i = 0; i < found.size(); ++i) {
      const at::Tensor a = found[i].to(at::kFloat);
      const at::Tensor b = expected[i].to(at::kFloat);
      const double off = ((a - b).abs().max() / b.abs().max()).item<double>();
      ds::require<ds::InternalError>(off <= allowed, of.name, ": expected the chain's result, found a difference of ",
                                     off);
    }
  };
  expect_same(of.fused(leaves), of.chain(exact));
  expect_same(pass(of.fused, leaves, cotangents), pass(of.chain, exact, exact_cotangents));
}

struct Timing {
  double fused, chain, ratio, low, high;
};

Timing timed(int64_t pairs, const std::function<void()>& fused, const std::function<void()>& chain) {
  std::vector<double> times[2];
  std::vector<double> ratios;
  fused();
  chain();
  for (int64_t pair = 0; pair < pairs; ++pair) {
    if (pair % 2 == 0) times[0].push_back(seconds(fused));
    times[1].push_back(seconds(chain));
    if (pair % 2 != 0) times[0].push_back(seconds(fused));
    ratios.push_back(times[0].back() / times[1].back());
  }
  return {quantile(times[0], 0.5), quantile(times[1], 0.5), quantile(ratios, 0.5), quantile(ratios, 0.25),
          quantile(ratios, 0.75)};
}

void print(const Operator& of, at::ScalarType type, const char* what, const Timing& time) {
  std::printf("%-24s %-9s %-17s %10.3f %10.3f %8.3f  %.3f..%.3f\n", of.name.c_str(), c10::toString(type), what,
              time.fused * 1e3, time.chain * 1e3, time.ratio, time.low, time.high);
  std::fflush(stdout);
}

std::function<void()> repeated(at::Device device, const std::function<void()>& body) {
  if (device.is_cpu()) return body;
  return [=] {
    for (int repeat = 0; repeat < kRepeats; ++repeat) body();
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  };
}

void measure(const Operator& of, at::Device device, at::ScalarType type, int64_t pairs) {
  const Tensors leaves = leaves_of(of.inputs, device, type);
  Tensors cotangents;
  for (const at::Tensor& result : of.chain(leaves)) cotangents.push_back(at::randn_like(result));
  check(of, leaves, cotangents, type);
  const auto forward = [&](const Function& function) {
    return repeated(device, [&] {
      const at::NoGradGuard no_grad;
      function(leaves);
    });
  };
  const auto both = [&](const Function& function) {
    return repeated(device, [&] { pass(function, leaves, cotangents); });
  };
  print(of, type, "forward", timed(pairs, forward(of.fused), forward(of.chain)));
  print(of, type, "forward, backward", timed(pairs, both(of.fused), both(of.chain)));
}

void run(const Size& size, int64_t pairs, const std::string& only) {
  const std::string on = size.device.is_cpu() ? ds::cat(at::get_num_threads(), " thread(s)")
                                              : ds::cat(size.device, ", runs of ", kRepeats);
  std::printf("%ld rows of %ld, %s, medians of %ld pairs\n%-24s %-9s %-17s %10s %10s %8s  %s\n", size.rows, size.size,
              on.c_str(), pairs, "", "", "", "fused, ms", "chain, ms", "ratio", "quartiles");
  const std::vector<Operator> operators = {norm("layer_norm", size, true, false),
                                           norm("add_layer_norm", size, true, true),
                                           norm("rms_norm", size, false, false),
                                           norm("add_rms_norm", size, false, true),
                                           swiglu(size),
                                           packed_swiglu(size),
                                           rope("rope, halves", size, ds::ops::RopePairs::kHalves),
                                           rope("rope, interleaved", size, ds::ops::RopePairs::kInterleaved)};
  for (const Operator& of : operators) {
    if (!only.empty() && of.name != only) continue;
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) measure(of, size.device, type, pairs);
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Fused operators beside LibTorch's chains");
  Size size;
  int64_t pairs = 15;
  int threads = 1;
  std::string only;
  app.add_option("--rows", size.rows)->check(CLI::PositiveNumber);
  app.add_option("--size", size.size, "elements of a row; divisible by heads")->check(CLI::PositiveNumber);
  app.add_option("--heads", size.heads)->check(CLI::PositiveNumber);
  app.add_option("--pairs", pairs, "runs of each kind")->check(CLI::PositiveNumber);
  app.add_option("--threads", threads)->check(CLI::PositiveNumber);
  std::string device = "cpu";
  app.add_option("--only", only, "one operator, by the name in the table");
  app.add_option("--device", device, "cpu, cuda or cuda:N");
  CLI11_PARSE(app, argc, argv);
  try {
    at::set_num_threads(threads);
    at::manual_seed(1);
    size.device = ds::engine::device_of_rank(device, 0);
    run(size, pairs, only);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "fused_ops_bench: " << error.what() << '\n';
    return 1;
  }
}
