// The cost of timing an operation between ranks: launch, end and wait, without the operation.
// Run as build/release/bin/comms_log_bench, with the flags of Google Benchmark.
#include <ATen/ops/empty.h>
#include <benchmark/benchmark.h>

#include "profiling/comms_log.h"

namespace ds::profiling {
namespace {

// The argument: how many sizes the log has records of.
void time_one(benchmark::State& state) {
  CommsLogOptions options{.rank = 0};
  options.operations.fill(true);
  const auto log = std::make_shared<CommsLog>(options);
  const auto observer = log->observer_of({0, 1});
  const int group = observer->add_group("world", {0, 1}, 0);
  std::vector<at::Tensor> tensors;
  for (int64_t i = 1; i <= state.range(0); ++i) tensors.push_back(at::empty({i * 16}));
  size_t next = 0;
  for (auto _ : state) {
    const at::Tensor& tensor = tensors[next++ % tensors.size()];
    comm::Collective collective{.kind = comm::CollectiveKind::kAllReduce, .input = tensor, .output = tensor};
    observer
        ->observe(group, collective,
                  [&] {
                    comm::tell_end(collective.timers);
                    return comm::Work();
                  })
        .wait();
  }
}
BENCHMARK(time_one)->Arg(1)->Arg(100);

}  // namespace
}  // namespace ds::profiling

BENCHMARK_MAIN();
