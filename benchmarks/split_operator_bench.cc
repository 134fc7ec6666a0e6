// The extra cost of an operator on split tensors over plain ones of the shard's sizes: finding its rule, and a tensor
// that shows the whole.
//
//   split_operator_bench --benchmark_repetitions=9 --benchmark_enable_random_interleaving=true
//
// One rank of two; the operators measured run no collective. Tensors are small, so that their own work hides nothing.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>

#include <functional>
#include <memory>
#include <string>

#include "comm/shared_memory/thread_group.h"
#include "dsengine/parallel.h"

namespace ds::parallel {
namespace {

using Operator = std::function<at::Tensor(const at::Tensor& x, const at::Tensor& w)>;

// `x` [4, 8] cut along its columns, or plain [4, 4]; `w` [4] or [8] alike. With gradients also what leads backward is
// made.
void apply(benchmark::State& state, const Operator& run, bool split, bool with_grad) {
  at::set_num_threads(1);
  static const comm::ThreadGroup kRanks(2);
  static const std::shared_ptr<Axis> kAxis = make_axis(kRanks.communicator(0));
  at::Tensor x = at::ones({4, split ? 8 : 4}).requires_grad_(with_grad);
  at::Tensor w = at::ones({split ? 8 : 4});
  if (split) {
    x = distribute(x, kAxis, 1);
    w = distribute(w, kAxis, 0);
  }
  const at::AutoGradMode mode(with_grad);
  for (auto _ : state) benchmark::DoNotOptimize(run(x, w));
}

void add(const std::string& name, const Operator& run) {
  for (const bool with_grad : {false, true}) {
    for (const bool split : {false, true}) {
      const std::string full = name + (with_grad ? ", gradient" : "") + (split ? ", split" : ", plain");
      benchmark::RegisterBenchmark(full.c_str(), [=](benchmark::State& state) { apply(state, run, split, with_grad); });
    }
  }
}

}  // namespace

void register_all() {
  add("add", [](const at::Tensor& x, const at::Tensor& w) { return x + w; });
  add("gelu", [](const at::Tensor& x, const at::Tensor& /*w*/) { return at::gelu(x); });
  add("transpose", [](const at::Tensor& x, const at::Tensor& /*w*/) { return x.transpose(0, 1); });
  add("view", [](const at::Tensor& x, const at::Tensor& /*w*/) { return x.view({2, 2, x.size(1)}); });
}

}  // namespace ds::parallel

int main(int argc, char** argv) {
  ds::parallel::register_all();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
