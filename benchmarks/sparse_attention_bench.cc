// Sparse attention of dsengine/sparse_attention.h beside LibTorch's dense scaled_dot_product_attention, on the CPU.
//
//   sparse_attention_bench [--tokens 1024,2048,4096,8192,16384] [--heads 4] [--channels 64] [--block 64] [--rounds 3]
//                          [--threads 1] [--causal] [--dtype float32]
//
// Each layout runs in turn with dense attention on the same tensors. Printed are the share of blocks that are computed
// (of those at and below the diagonal with --causal), medians of forward and of forward and backward, their ratios to
// dense (below 1: faster), and nanoseconds for a block of the layout, which do not change where time is in proportion
// to blocks. Checked, up to 2048 tokens: results and gradients are those of dense attention under the layout's mask.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "benchmarks/paired_timing.h"
#include "core/check.h"
#include "dsengine/sparse_attention.h"

namespace {

using ds::benchmarks::quantile;
using ds::benchmarks::seconds;
using ds::ops::BlockLayout;
using ds::ops::SparsityMode;
using ds::ops::SparsityPattern;
using Tensors = std::vector<at::Tensor>;
using Function = std::function<at::Tensor(const Tensors&)>;

struct Options {
  std::vector<int64_t> tokens = {1024, 2048, 4096, 8192, 16384};
  int64_t heads = 4;
  int64_t channels = 64;
  int64_t block = 64;
  int64_t rounds = 3;
  int threads = 1;
  bool causal = false;
  std::string dtype = "float32";
};

struct Case {
  std::string name;
  BlockLayout layout;
};

// Every second block, and patterns of a ds_config.
std::vector<Case> cases(const Options& options, int64_t tokens) {
  const auto made = [&](SparsityPattern pattern) {
    pattern.block = options.block;
    pattern.unidirectional = options.causal;
    return ds::ops::block_layout(pattern, options.heads, tokens, 1);
  };
  BlockLayout half = made({.mode = SparsityMode::kDense});
  for (int64_t i = 0; i < half.blocks * half.blocks; ++i) {
    const bool odd = (i / half.blocks + i % half.blocks) % 2 != 0;
    half.kept[static_cast<size_t>(i)] &= static_cast<uint8_t>(!odd);
  }
  return {{"all blocks", made({.mode = SparsityMode::kDense})},
          {"every second block", half},
          {"fixed", made({.mode = SparsityMode::kFixed})},
          {"bigbird", made({.mode = SparsityMode::kBigBird, .num_random_blocks = 1})},
          {"sliding window of 3", made({.mode = SparsityMode::kSlidingWindow})}};
}

Tensors pass(const Function& function, const Tensors& leaves, const at::Tensor& cotangent) {
  return torch::autograd::grad({function(leaves)}, leaves, {cotangent});
}

void check(const Case& of, const Options& options, const Function& sparse, const Tensors& leaves,
           const at::Tensor& cotangent) {
  const at::Tensor kept = at::empty({of.layout.blocks, of.layout.blocks}, at::kByte);
  for (int64_t i = 0; i < kept.numel(); ++i)
    kept.mutable_data_ptr<uint8_t>()[i] = of.layout.kept[static_cast<size_t>(i)];
  at::Tensor mask = kept.to(at::kBool).repeat_interleave(options.block, 0).repeat_interleave(options.block, 1);
  if (options.causal) mask = mask.tril();
  Tensors exact;
  for (const at::Tensor& leaf : leaves) exact.push_back(leaf.detach().to(at::kDouble).requires_grad_(true));
  const Function dense = [&](const Tensors& in) { return at::scaled_dot_product_attention(in[0], in[1], in[2], mask); };
  const double allowed = leaves[0].scalar_type() == at::kBFloat16 ? 3e-2 : 1e-5;
  const auto expect_same = [&](const at::Tensor& found, const at::Tensor& expected) {
    const double off = ((found.to(at::kDouble) - expected).abs().max() / expected.abs().max()).item<double>();
    ds::require<ds::InternalError>(off <= allowed, of.name,
                                   ": expected dense attention's result, found a difference of ", off);
  };
  expect_same(sparse(leaves), dense(exact));
  const Tensors found = pass(sparse, leaves, cotangent);
  const Tensors expected = pass(dense, exact, cotangent.to(at::kDouble));
  for (size_t i = 0; i < found.size(); ++i) expect_same(found[i], expected[i]);
}

// Medians of `rounds` runs of each, in turn, after one that is not counted.
std::pair<double, double> medians(int64_t rounds, const std::function<void()>& first,
                                  const std::function<void()>& second) {
  std::vector<double> times[2];
  first();
  second();
  for (int64_t round = 0; round < rounds; ++round) {
    times[0].push_back(seconds(first));
    times[1].push_back(seconds(second));
  }
  return {quantile(times[0], 0.5), quantile(times[1], 0.5)};
}

void measure(const Case& of, const Options& options, const Tensors& leaves, const at::Tensor& cotangent) {
  const Function sparse = [&](const Tensors& in) {
    return ds::ops::sparse_attention(in[0], in[1], in[2], of.layout, {.causal = options.causal});
  };
  const Function dense = [&](const Tensors& in) {
    return at::scaled_dot_product_attention(in[0], in[1], in[2], {}, 0.0, options.causal);
  };
  const int64_t tokens = leaves[0].size(2);
  if (tokens <= 2048) check(of, options, sparse, leaves, cotangent);
  const auto forward = [&](const Function& function) {
    return [&] {
      const at::NoGradGuard no_grad;
      function(leaves);
    };
  };
  const auto both = [&](const Function& function) { return [&] { pass(function, leaves, cotangent); }; };
  const auto [own, theirs] = medians(options.rounds, forward(sparse), forward(dense));
  const auto [own_both, their_both] = medians(options.rounds, both(sparse), both(dense));
  const int64_t n = of.layout.blocks;
  const auto blocks = static_cast<double>(of.layout.count());
  const auto all = static_cast<double>(options.causal ? n * (n + 1) / 2 : n * n);
  std::printf("%6ld %-20s %6.1f %% %9.1f %9.1f %7.3f %9.1f %9.1f %7.3f %9.0f\n", tokens, of.name.c_str(),
              100 * blocks / all, own * 1e3, theirs * 1e3, own / theirs, own_both * 1e3, their_both * 1e3,
              own_both / their_both, own_both * 1e9 / (blocks * static_cast<double>(options.heads)));
  std::fflush(stdout);
}

void run(const Options& options) {
  static const std::map<std::string, at::ScalarType> kTypes = {
      {"float32", at::kFloat}, {"float64", at::kDouble}, {"bfloat16", at::kBFloat16}};
  std::printf(
      "1 x %ld heads x %ld channels, blocks of %ld, %s, %d thread(s)%s, medians of %ld\n%6s %-20s %8s %9s %9s %7s "
      "%9s %9s %7s %9s\n",
      options.heads, options.channels, options.block, options.dtype.c_str(), at::get_num_threads(),
      options.causal ? ", causal" : "", options.rounds, "tokens", "layout", "blocks", "fwd, ms", "dense", "ratio",
      "both, ms", "dense", "ratio", "ns/block");
  for (const int64_t tokens : options.tokens) {
    Tensors leaves;
    for (int i = 0; i < 3; ++i) {
      leaves.push_back(
          at::randn({1, options.heads, tokens, options.channels}, kTypes.at(options.dtype)).requires_grad_(true));
    }
    const at::Tensor cotangent = at::randn_like(leaves[0]).detach();
    for (const Case& of : cases(options, tokens)) measure(of, options, leaves, cotangent);
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Sparse attention beside dense attention");
  Options options;
  app.add_option("--tokens", options.tokens)->delimiter(',')->check(CLI::PositiveNumber);
  app.add_option("--heads", options.heads)->check(CLI::PositiveNumber);
  app.add_option("--channels", options.channels)->check(CLI::PositiveNumber);
  app.add_option("--block", options.block, "tokens of a block")->check(CLI::PositiveNumber);
  app.add_option("--rounds", options.rounds, "runs of each kind")->check(CLI::PositiveNumber);
  app.add_option("--threads", options.threads)->check(CLI::PositiveNumber);
  app.add_flag("--causal", options.causal);
  app.add_option("--dtype", options.dtype)->check(CLI::IsMember({"float32", "float64", "bfloat16"}));
  CLI11_PARSE(app, argc, argv);
  try {
    at::set_num_threads(options.threads);
    at::manual_seed(1);
    run(options);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "sparse_attention_bench: " << error.what() << '\n';
    return 1;
  }
}
