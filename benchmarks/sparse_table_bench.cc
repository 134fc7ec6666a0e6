// The step of a table with sparse(true) under Adagrad beside plain LibTorch's, in turns in one run.
//
//   sparse_table_bench [--rows 4000000] [--width 16] [--reads 256] [--steps 60] [--ranks 1,2]
//
// A step reads `reads` rows on each rank, makes the sum of their squares, its gradient, and an update. Ranks are
// threads with one thread of operators each; plain LibTorch's step reads as many rows as one rank. Printed for each
// number of ranks and stage, of rank 0: medians of both, and the median of the ratios of neighbours with its quartiles.
// Checked: after each step of one rank, the rows that it has read are those of the plain table.
#include <ATen/Parallel.h>
#include <torch/nn/modules/embedding.h>
#include <torch/optim/adagrad.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "benchmarks/paired_timing.h"
#include "benchmarks/rank_threads.h"
#include "core/check.h"
#include "dsengine/engine.h"

namespace {

struct Options {
  int64_t rows = 4'000'000;
  int64_t width = 16;
  int64_t reads = 256;
  int64_t steps = 60;
  std::vector<int> ranks = {1, 2};
};

struct Times {
  std::vector<double> plain, engine, ratio;  // seconds; engine over plain
};

constexpr double kRate = 0.05;

torch::nn::Embedding table_of(const Options& options) {
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(options.rows, options.width).sparse(true));
  const torch::NoGradGuard no_grad;
  table->weight.fill_(0.5);
  return table;
}

at::Tensor batch_of(const Options& options, int64_t step, int rank) {
  const int64_t begin = (step * 7919 + rank) * options.reads;
  return (at::arange(begin, begin + options.reads) * 104'729).remainder(options.rows);
}

at::Tensor loss_of(torch::nn::Embedding& table, const at::Tensor& batch) { return table(batch).pow(2).sum(); }

// Compares rows with those of the plain table, which has read the same batches.
void check_rows(torch::nn::Embedding& own, torch::nn::Embedding& plain, const at::Tensor& batch) {
  const torch::NoGradGuard no_grad;
  ds::require<ds::InternalError>(own(batch).allclose(plain(batch), 1e-5, 1e-6), "expected the rows of the plain table");
}

Times train(const Options& options, int stage, const std::shared_ptr<ds::comm::Communicator>& ranks) {
  torch::nn::Embedding table = table_of(options);
  const nlohmann::ordered_json config = {
      {"train_micro_batch_size_per_gpu", 1},
      {"gradient_clipping", 0.0},
      {"optimizer", {{"type", "Adagrad"}, {"params", {{"lr", kRate}}}}},
      {"zero_allow_untested_optimizer", true},
      {"zero_optimization", {{"stage", stage}}},
  };
  const auto engine = ds::engine::initialize({.model = table.ptr(), .config = config, .communicator = ranks}).engine;
  torch::nn::Embedding plain{nullptr};
  std::unique_ptr<torch::optim::Adagrad> optimizer;
  if (ranks->rank() == 0) {
    plain = table_of(options);
    optimizer = std::make_unique<torch::optim::Adagrad>(plain->parameters(), torch::optim::AdagradOptions(kRate));
  }
  Times times;
  constexpr int64_t kWarmup = 5;
  for (int64_t step = -kWarmup; step < options.steps; ++step) {
    const at::Tensor batch = batch_of(options, step + kWarmup, ranks->rank());
    ranks->barrier();
    const double own = ds::benchmarks::seconds([&] {
      engine->backward(loss_of(table, batch));
      engine->step();
    });
    ranks->barrier();
    if (!plain) continue;
    const double beside = ds::benchmarks::seconds([&] {
      optimizer->zero_grad();
      loss_of(plain, batch).backward();
      optimizer->step();
    });
    if (ranks->size() == 1) check_rows(table, plain, batch);
    if (step < 0) continue;
    times.engine.push_back(own);
    times.plain.push_back(beside);
    times.ratio.push_back(own / beside);
  }
  return times;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("The step of a sparse table beside plain LibTorch's");
  Options options;
  app.add_option("--rows", options.rows, "of the table")->check(CLI::PositiveNumber);
  app.add_option("--width", options.width, "of a row")->check(CLI::PositiveNumber);
  app.add_option("--reads", options.reads, "rows of a step and rank")->check(CLI::PositiveNumber);
  app.add_option("--steps", options.steps)->check(CLI::PositiveNumber);
  app.add_option("--ranks", options.ranks, "numbers of ranks, threads of this process")->delimiter(',');
  CLI11_PARSE(app, argc, argv);
  try {
    at::set_num_threads(1);
    std::printf("%ld rows of %ld, %ld read in a step and rank\n", options.rows, options.width, options.reads);
    std::printf("%-6s %-6s %14s %14s %30s\n", "ranks", "stage", "plain, ms", "engine, ms",
                "engine / plain (quartiles)");
    for (const int size : options.ranks) {
      for (const int stage : {0, 1, 2, 3}) {
        const auto train_rank = [&](const auto& ranks) { return train(options, stage, ranks); };
        const Times times = ds::benchmarks::result_of_rank_0(size, train_rank);
        const auto ratio = [&](double share) { return ds::benchmarks::quantile(times.ratio, share); };
        std::printf("%-6d %-6d %14.3f %14.3f %12.2f (%.2f to %.2f)\n", size, stage,
                    ds::benchmarks::quantile(times.plain, 0.5) * 1e3, ds::benchmarks::quantile(times.engine, 0.5) * 1e3,
                    ratio(0.5), ratio(0.25), ratio(0.75));
        std::fflush(stdout);
      }
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "sparse_table_bench: " << error.what() << '\n';
    return 1;
  }
}
