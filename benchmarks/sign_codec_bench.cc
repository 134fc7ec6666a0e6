// The sign codec of the compressed optimizers beside the speed of this machine's memory.
//
//   sign_codec_bench [--elements 40000000] [--range 0] [--threads 1] [--rounds 9]
//
// One line for each operation: ns per element, GB/s of the bytes that its pass moves (encode reads 4 bytes of an
// element and writes 4 and a bit; scales reads 4; decode reads a bit and writes 4; add reads and writes 4 and reads a
// bit), and its share of a triad's rate, which counts 12 bytes of an element. Every run stands between two triads of as
// many elements, on the same threads; the share is the median of the rounds (in brackets the 10th and 90th percentile).
// "by operators" is the same by LibTorch's operators. --range: elements that share a scale, 0 for one scale in all.
//
// Results are checked before they are timed. Times do not decide the exit code.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <functional>
#include <iostream>
#include <vector>

#include "benchmarks/memory_stream.h"
#include "benchmarks/paired_timing.h"
#include "compression/sign_codec.h"
#include "core/check.h"

namespace {

using ds::compression::ScaleRange;
using ds::compression::SignCodec;

struct Settings {
  int64_t elements = 40000000;
  int64_t range = 0;
  int threads = 1;
  int64_t rounds = 9;
};

std::vector<ScaleRange> ranges_of(const Settings& settings) {
  const int64_t length = settings.range == 0 ? settings.elements : settings.range;
  std::vector<ScaleRange> ranges;
  for (int64_t begin = 0; begin < settings.elements; begin += (length + 7) / 8 * 8) {
    ranges.push_back({begin, std::min(length, settings.elements - begin)});
  }
  return ranges;
}

class Bench {
 public:
  explicit Bench(const Settings& settings)
      : settings_(settings),
        codec_(ranges_of(settings), settings.elements),
        triad_(settings.elements),
        values_(at::randn({settings.elements})),
        scales_(at::empty({codec_.range_count()})),
        bits_(at::empty({codec_.bytes()}, at::kByte)) {}

  void check_results() {
    const at::Tensor start = values_.clone();
    const at::Tensor by_operators = values_.clone();
    const at::Tensor bits_by_operators = at::empty_like(bits_);
    codec_.scales(values_, scales_);
    codec_.encode(values_, scales_, bits_);
    codec_.encode_by_operators(by_operators, scales_, bits_by_operators);
    ds::require<ds::InternalError>(at::equal(values_, by_operators) && at::equal(bits_, bits_by_operators),
                                   "expected the same bits and values by kernels and by operators");
    codec_.add(bits_, scales_, values_);
    ds::require<ds::InternalError>(at::allclose(values_, start, 0, 1e-5), "expected bits and rest to be all there was");
  }

  void run() {
    const double triad_gb_s = triad_rate();
    std::printf("%ld elements, %ld scales, %d threads; triad %.1f GB/s\n%-22s %10s %8s  %s\n", settings_.elements,
                codec_.range_count(), settings_.threads, triad_gb_s, "", "ns/element", "GB/s", "share of triad");
    measure("scales", 4, [&] { codec_.scales(values_, scales_); });
    measure("encode", 8.125, [&] { codec_.encode(values_, scales_, bits_); });
    measure("decode", 4.125, [&] { codec_.decode(bits_, scales_, values_); });
    measure("add", 8.125, [&] { codec_.add(bits_, scales_, values_); });
    measure("scales by operators", 4, [&] { codec_.scales_by_operators(values_, scales_); });
    measure("encode by operators", 8.125, [&] { codec_.encode_by_operators(values_, scales_, bits_); });
    measure("decode by operators", 4.125, [&] { codec_.decode_by_operators(bits_, scales_, values_); });
    measure("add by operators", 8.125, [&] { codec_.add_by_operators(bits_, scales_, values_); });
  }

 private:
  double gb_s(double bytes, double time) const { return bytes * static_cast<double>(settings_.elements) / time / 1e9; }

  double triad_rate() {
    std::vector<double> times;
    for (int64_t round = 0; round <= settings_.rounds; ++round) {
      times.push_back(ds::benchmarks::seconds([&] { triad_.run(); }));
    }
    return gb_s(ds::benchmarks::Triad::kBytes, ds::benchmarks::quantile(times, 0.5));
  }

  void measure(const char* name, double bytes, const std::function<void()>& body) {
    using ds::benchmarks::quantile;
    const auto times = ds::benchmarks::paired_times(settings_.rounds, body, [&] { triad_.run(); });
    const double time = quantile(times.body, 0.5);
    const auto share = [&](double at) { return quantile(times.paired, at) * bytes / ds::benchmarks::Triad::kBytes; };
    std::printf("%-22s %10.3f %8.1f  %.3f [%.3f %.3f]\n", name, time / static_cast<double>(settings_.elements) * 1e9,
                gb_s(bytes, time), share(0.5), share(0.1), share(0.9));
    std::fflush(stdout);
  }

  Settings settings_;
  SignCodec codec_;
  ds::benchmarks::Triad triad_;
  at::Tensor values_, scales_, bits_;
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("The sign codec of the compressed optimizers beside the speed of this machine's memory");
  Settings settings;
  app.add_option("--elements", settings.elements)->check(CLI::Range(int64_t{1}, int64_t{1} << 31));
  app.add_option("--range", settings.range, "elements that share a scale, 0: all")->check(CLI::NonNegativeNumber);
  app.add_option("--threads", settings.threads)->check(CLI::PositiveNumber);
  app.add_option("--rounds", settings.rounds, "measured runs of each operation")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  try {
    const at::NoGradGuard no_grad;
    at::set_num_threads(settings.threads);
    at::manual_seed(1);
    Bench bench(settings);
    bench.check_results();
    bench.run();
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "sign_codec_bench: " << error.what() << '\n';
    return 1;
  }
}
