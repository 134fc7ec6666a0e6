// How long a training waits for its data: a dataset that sleeps in each sample, and steps that take as long as they are
// told.
//
//   loader_bench [--sample_ms 20] [--batch 4] [--workers 4] [--step_ms 22] [--steps 200] [--prefetch_factor 2]
//
// With enough workers, a step longer than batch * sample_ms / workers does not wait but for the first batch. Printed:
// the time of the steps and of waits, the waits' share with and without the first batch, and whether the batches are
// those that a loader without workers gives of the same samples.
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <exception>
#include <iostream>
#include <thread>
#include <vector>

#include "dsengine/loader.h"

namespace {

using Seconds = std::chrono::duration<double>;

struct Options {
  int sample_ms = 20;
  int64_t batch = 4;
  int workers = 4;
  double step_ms = 22;
  int64_t steps = 200;
  int prefetch_factor = 2;
};

struct Sleeping {
  at::Tensor get(size_t index) const {
    std::this_thread::sleep_for(std::chrono::milliseconds(sample_ms));
    return at::full({16}, static_cast<double>(index)) + at::rand({16}, ds::data::sample_generator());
  }
  size_t size() const { return static_cast<size_t>(samples); }
  int sample_ms = 0;
  int64_t samples = 0;
};

ds::data::Loader<Sleeping> loader_of(const Options& options, int sample_ms, int workers) {
  return {
      Sleeping{sample_ms, options.batch * options.steps},
      {.batch_size = options.batch, .reading = {.num_workers = workers, .prefetch_factor = options.prefetch_factor}}};
}

int run(const Options& options) {
  auto loader = loader_of(options, options.sample_ms, options.workers);
  auto reference = loader_of(options, 0, 0);
  auto expected = reference.begin();
  bool is_same = true;
  double first_wait = 0;
  double computed = 0;
  const auto begin = std::chrono::steady_clock::now();
  for (const at::Tensor& batch : loader) {
    if (computed == 0) first_wait = Seconds(loader.waited()).count();
    const auto step = std::chrono::steady_clock::now();
    is_same = is_same && at::equal(batch, *expected);
    ++expected;
    std::this_thread::sleep_until(step + Seconds(options.step_ms / 1e3));
    computed += Seconds(std::chrono::steady_clock::now() - step).count();
  }
  const double all = Seconds(std::chrono::steady_clock::now() - begin).count();
  const double waited = Seconds(loader.waited()).count();
  std::printf("steps %.3f s, waits %.3f s (first batch %.3f s)\n", computed, waited, first_wait);
  std::printf("share of waits: %.2f %% of the run, %.2f %% after the first batch\n", 100 * waited / all,
              100 * (waited - first_wait) / (all - first_wait));
  std::printf("batches are those of a loader without workers: %s\n", is_same ? "yes" : "NO");
  return is_same ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("waits of a training for its data");
  app.add_option("--sample_ms", options.sample_ms, "milliseconds that a sample takes");
  app.add_option("--batch", options.batch, "samples in a batch");
  app.add_option("--workers", options.workers, "threads that read");
  app.add_option("--step_ms", options.step_ms, "milliseconds that a step computes");
  app.add_option("--steps", options.steps, "steps");
  app.add_option("--prefetch_factor", options.prefetch_factor, "batches that a worker reads ahead");
  CLI11_PARSE(app, argc, argv);
  try {
    return run(options);
  } catch (const std::exception& error) {
    std::cerr << "loader_bench: " << error.what() << "\n";
    return 1;
  }
}
