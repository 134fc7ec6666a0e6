// The cost of writing a collective down: begin, wait and end, without the collective.
// Run as build/release/bin/flight_recorder_bench, with the flags of Google Benchmark.
#include <ATen/ops/empty.h>
#include <benchmark/benchmark.h>

#include "comm/flight/flight_recorder.h"

namespace ds::comm {
namespace {

void record(benchmark::State& state) {
  const auto recorder =
      std::make_shared<FlightRecorder>(FlightRecorderOptions{.rank = 0, .world_size = 2, .host = "h"});
  const int group = recorder->add_group("world", {0, 1}, 0);
  const at::Tensor tensor = at::empty({1 << 20});
  const Collective collective{
      .kind = CollectiveKind::kAllReduce, .input = tensor, .output = tensor, .label = "gradients of bucket 12"};
  for (auto _ : state) recorder->follow(recorder->begin(group, collective), Work()).wait();
}
BENCHMARK(record);

// Measures what a heartbeat sends.
void board(benchmark::State& state) {
  const auto recorder =
      std::make_shared<FlightRecorder>(FlightRecorderOptions{.rank = 0, .world_size = 2, .host = "h"});
  const int group = recorder->add_group("world", {0, 1}, 0);
  const at::Tensor tensor = at::empty({4});
  for (int i = 0; i < 512; ++i) {
    recorder
        ->follow(recorder->begin(group, {.kind = CollectiveKind::kAllReduce, .input = tensor, .output = tensor}),
                 Work())
        .wait();
  }
  size_t bytes = 0;
  for (auto _ : state) bytes = to_board(recorder->log()).size();
  state.counters["bytes"] = static_cast<double>(bytes);
}
BENCHMARK(board);

}  // namespace
}  // namespace ds::comm

BENCHMARK_MAIN();
