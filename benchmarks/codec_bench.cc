// Speed of core/numbers/block_codec: GB/s of the values' own type, beside a plain copy. --benchmark_filter=REGEX picks
// some,
// --benchmark_min_time=SECONDS sets the least time of each. Names: bits, type; threads: LibTorch's.
//
// Each result is checked once before it is timed.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>

#include <vector>

#include "core/check.h"
#include "core/numbers/block_codec.h"

namespace {

constexpr int64_t kValues = int64_t{1} << 24;

void count(benchmark::State& state, const at::Tensor& values, int64_t parts = 1) {
  state.SetBytesProcessed(state.iterations() * parts * static_cast<int64_t>(values.nbytes()));
}

void check(const at::Tensor& decoded, const at::Tensor& values, const ds::BlockCodec& codec) {
  const auto error = (decoded - values).abs().max().item<double>();
  const double bound = values.abs().max().item<double>() / codec.levels() * 0.51 + 0.02;
  ds::require<ds::InternalError>(error <= bound, "block codec: expected an error of at most ", bound, ", found ",
                                 error);
}

void encode(benchmark::State& state, at::ScalarType dtype) {
  at::set_num_threads(static_cast<int>(state.range(1)));
  const ds::BlockCodec codec(static_cast<int>(state.range(0)));
  const at::Tensor values = at::randn({kValues}).to(dtype);
  const at::Tensor encoded = at::empty({codec.encoded_bytes(kValues)}, at::kByte);
  at::Tensor decoded = at::empty_like(values);
  codec.encode(values, encoded);
  codec.decode(encoded, decoded);
  check(decoded, values, codec);
  for (auto _ : state) codec.encode(values, encoded);
  count(state, values);
}

void decode_sum(benchmark::State& state, at::ScalarType dtype, int64_t parts) {
  at::set_num_threads(static_cast<int>(state.range(1)));
  const ds::BlockCodec codec(static_cast<int>(state.range(0)));
  const at::Tensor values = at::randn({kValues}).to(dtype);
  std::vector<at::Tensor> encoded;
  for (int64_t part = 0; part < parts; ++part) {
    encoded.push_back(at::empty({codec.encoded_bytes(kValues)}, at::kByte));
    codec.encode(values, encoded.back());
  }
  at::Tensor decoded = at::empty_like(values);
  codec.decode_sum(encoded, decoded, static_cast<int>(parts));
  check(decoded, values, codec);
  for (auto _ : state) codec.decode_sum(encoded, decoded, static_cast<int>(parts));
  count(state, values, parts);
}

void copy(benchmark::State& state) {
  at::set_num_threads(static_cast<int>(state.range(0)));
  const at::Tensor values = at::randn({kValues});
  at::Tensor other = at::empty_like(values);
  for (auto _ : state) other.copy_(values);
  count(state, values);
}

const std::vector<std::vector<int64_t>> kBitsAndThreads = {{8, 4}, {1, at::get_num_threads()}};

BENCHMARK(copy)->ArgName("threads")->Arg(1)->Arg(at::get_num_threads())->UseRealTime();
#define DS_BENCHMARK(...) \
  BENCHMARK_CAPTURE(__VA_ARGS__)->ArgNames({"bits", "threads"})->ArgsProduct(kBitsAndThreads)->UseRealTime()
DS_BENCHMARK(encode, float32, at::kFloat);
DS_BENCHMARK(encode, bfloat16, at::kBFloat16);
DS_BENCHMARK(encode, float16, at::kHalf);
DS_BENCHMARK(decode_sum, float32, at::kFloat, 1);
DS_BENCHMARK(decode_sum, bfloat16, at::kBFloat16, 1);
DS_BENCHMARK(decode_sum, float16, at::kHalf, 1);
DS_BENCHMARK(decode_sum, float32_of_4, at::kFloat, 4);

}  // namespace

BENCHMARK_MAIN();
