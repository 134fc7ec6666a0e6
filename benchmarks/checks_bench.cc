// The cost of the checks that the engine makes in every step of what the program did: parameters and gradients that
// were taken away, changed or frozen, passes of other engines, ranks that part. Trains the tiny GPT of
// scripts/compare_peers by the engine and reads the checks' own timer (core/check_time.h).
//
//   checks_bench [--ranks 2] [--batch 4] [--steps 60] [--client]
//
// --client: with an optimizer of the program's, whose states are looked at as well.
//
// Ranks are threads with one thread of operators each. Printed for each stage, of rank 0: medians over the steps, and
// lower quartiles, which other programs on the machine disturb less. Waiting for the checks' one exchange of eight
// numbers stands apart: it is the other ranks' computing (they come later) more than the exchange, and what is not
// waited there is waited at the next collective of the step.
//
// check_replicas compares after every second step. Such steps stand apart: the watch is what they cost more, its own
// time and what it waits, and the next column is both beside 100 steps, as "check_replicas": 100 would have it.
//
// The last two columns are the cost of the digests of settings and of a client optimizer's states in a step. They are
// made 1000 times after the last one, and travel with the numbers of the checks' one exchange.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/optim/adamw.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <exception>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "benchmarks/paired_timing.h"
#include "benchmarks/rank_threads.h"
#include "core/check.h"
#include "core/check_time.h"
#include "dsengine/engine.h"
#include "dsengine/initialize.h"
#include "engine/engine_impl.h"
#include "examples/gpt/gpt_init.h"
#include "examples/gpt/gpt_model.h"

namespace {

struct Options {
  int ranks = 2;
  int64_t batch = 4;
  int64_t steps = 60;
  bool client = false;
};

struct Times {
  std::vector<double> step, checks, waiting;  // seconds, of the steps without a watch
  std::vector<double> watch, watch_waiting;   // those of checks and waiting, of the steps with one
  double settings = 0;                        // seconds of the digests of settings and states in a step
};

double seconds(std::chrono::nanoseconds time) { return std::chrono::duration<double>(time).count(); }

// Measures the digests, in one step, of what reaches the update beside parameters and gradients.
double seconds_of_settings(ds::engine::Engine& engine) {
  using Settings = ds::engine::StepSettings;
  Settings& settings = *ds::engine::EngineAccess::impl_of(engine).settings;
  constexpr int kTimes = 1000;
  uint64_t all = 0;
  const double whole = ds::benchmarks::seconds([&] {
    for (int i = 0; i < kTimes; ++i) {
      all |= settings.digest(Settings::Among::kDataRanks);
      all |= settings.digest_of_states();
      settings.note_states();
    }
  });
  ds::require<ds::InternalError>(all != 0, "expected a digest of settings, found none");
  return whole / kTimes;
}

Times train(const Options& options, int stage, const std::shared_ptr<ds::comm::Communicator>& communicator) {
  const gpt::GptConfig size;
  const auto model = std::make_shared<gpt::Gpt>(size);
  gpt::initialize_weights(*model, 1);
  nlohmann::ordered_json config = {
      {"train_micro_batch_size_per_gpu", options.batch},
      {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-3}}}}},
      {"zero_optimization", {{"stage", stage}}},
      {"check_replicas", 2},
  };
  ds::engine::InitializeOptions made{.model = model, .communicator = communicator};
  if (options.client) {
    config.erase("optimizer");
    made.optimizer = std::make_shared<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(1e-3));
  }
  made.config = config;
  const auto engine = ds::engine::initialize(made).engine;
  const at::Tensor numbers = at::arange(options.batch * size.seq_len, at::kLong).mul(31 + communicator->rank());
  const at::Tensor tokens = numbers.remainder(size.vocab).view({options.batch, size.seq_len});
  Times times;
  constexpr int64_t kWarmup = 3;
  for (int64_t step = -kWarmup; step < options.steps; ++step) {
    const ds::CheckTime::Total before = ds::CheckTime::of_this_thread();
    const double whole = ds::benchmarks::seconds([&] {
      engine->backward(model->forward(tokens, tokens));
      engine->step();
    });
    if (step < 0) continue;
    const bool watched = engine->global_steps() % 2 == 0;
    if (!watched) times.step.push_back(whole);
    const ds::CheckTime::Total after = ds::CheckTime::of_this_thread();
    (watched ? times.watch : times.checks).push_back(seconds(after.own - before.own));
    (watched ? times.watch_waiting : times.waiting).push_back(seconds(after.waiting - before.waiting));
  }
  ds::require<ds::InternalError>(engine->global_steps() == options.steps + kWarmup, "expected all steps to be counted");
  ds::require<ds::InternalError>(times.checks.back() > 0, "expected checks in every step, found none");
  times.settings = seconds_of_settings(*engine);
  return times;
}

void print_watch(const Times& times) {
  const auto more = [](const std::vector<double>& with, const std::vector<double>& without) {
    return ds::benchmarks::quantile(with, 0.5) - ds::benchmarks::quantile(without, 0.5);
  };
  const double own = more(times.watch, times.checks);
  const double waits = more(times.watch_waiting, times.waiting);
  const double hundred_steps = 100 * ds::benchmarks::quantile(times.step, 0.5);
  std::printf(" %12.1f %12.1f %14.4f", own / 1e-6, waits / 1e-6, (own + waits) / hundred_steps / 1e-2);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("What the checks of each step cost on the tiny GPT");
  Options options;
  app.add_option("--ranks", options.ranks, "threads of this process")->check(CLI::PositiveNumber);
  app.add_option("--batch", options.batch, "sequences a step and rank")->check(CLI::PositiveNumber);
  app.add_option("--steps", options.steps)->check(CLI::Range(2, 1000000));
  app.add_flag("--client", options.client, "an optimizer of the program's");
  CLI11_PARSE(app, argc, argv);
  try {
    at::set_num_threads(1);
    std::printf("%d ranks, batch %ld, %ld steps\n", options.ranks, options.batch, options.steps);
    std::printf("%-7s %22s %22s %22s %22s %12s %12s %14s %12s %12s\n", "stage", "step, ms (quartile)",
                "checks, us (quartile)", "share, % (quartile)", "waiting, us (quartile)", "watch, us", "it waits, us",
                "1 in 100, %", "settings, us", "share, %");
    for (const int stage : {0, 1, 2, 3}) {
      const auto train_rank = [&](const auto& ranks) { return train(options, stage, ranks); };
      const Times times = ds::benchmarks::result_of_rank_0(options.ranks, train_rank);
      std::printf("%-7d", stage);
      const auto print = [](const std::vector<double>& values, double unit, const std::vector<double>& of) {
        double shown[2];
        for (const int i : {0, 1}) {
          const double share = i == 0 ? 0.5 : 0.25;
          shown[i] = ds::benchmarks::quantile(values, share) / (of.empty() ? 1.0 : ds::benchmarks::quantile(of, share));
        }
        std::printf(" %10.3f (%9.3f)", shown[0] / unit, shown[1] / unit);
      };
      print(times.step, 1e-3, {});
      print(times.checks, 1e-6, {});
      print(times.checks, 1e-2, times.step);
      print(times.waiting, 1e-6, {});
      print_watch(times);
      const double step = ds::benchmarks::quantile(times.step, 0.5);
      std::printf(" %12.2f %12.4f\n", times.settings / 1e-6, times.settings / step / 1e-2);
      std::fflush(stdout);
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "checks_bench: " << error.what() << '\n';
    return 1;
  }
}
