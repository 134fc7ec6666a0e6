// Chunked linear + cross-entropy beside at::linear and at::cross_entropy_loss: time and memory of forward and backward.
//
//   linear_cross_entropy_bench [--rows 2048] [--hidden 768] [--vocab 32000] [--dtype float32] [--pairs 5]
//
// Each kind runs in turn on the same tensors; printed are medians, the median of the ratios of neighbours, between
// which quartiles these lie (the noise), and the most memory that one forward and backward adds to the process (its
// peak of resident pages), gradients of hidden and weight included. Checked: both losses and gradients agree.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "benchmarks/paired_timing.h"
#include "core/check.h"
#include "core/memory/host_memory.h"
#include "dsengine/ops.h"

namespace {

using ds::benchmarks::quantile;
using ds::benchmarks::seconds;

struct Size {
  int64_t rows = 2048;
  int64_t hidden = 768;
  int64_t vocab = 32000;
  at::ScalarType dtype = at::kFloat;
  int64_t chunk_rows = 0;
};

constexpr double kMiB = 1 << 20;

class Job {
 public:
  explicit Job(const Size& size) : size_(size) {
    at::manual_seed(1);
    hidden_ = at::randn({size.rows, size.hidden}).to(size.dtype).requires_grad_(true);
    weight_ = at::randn({size.vocab, size.hidden}).mul(0.02).to(size.dtype).requires_grad_(true);
    targets_ = at::randint(size.vocab, {size.rows}, at::kLong);
  }

  at::Tensor plain() const { return at::cross_entropy_loss(at::linear(hidden_, weight_).to(at::kFloat), targets_); }
  at::Tensor chunked() const {
    return ds::ops::linear_cross_entropy(hidden_, weight_, {}, targets_, {.chunk_rows = size_.chunk_rows});
  }

  // Loss and both gradients, of a loss that is scaled as a training engine scales it.
  std::vector<at::Tensor> step(bool is_chunked) const {
    const at::Tensor loss = is_chunked ? chunked() : plain();
    std::vector<at::Tensor> result = torch::autograd::grad({loss * 0.5}, {hidden_, weight_});
    result.push_back(loss.detach());
    return result;
  }

 private:
  Size size_;
  at::Tensor hidden_, weight_, targets_;
};

int64_t status_bytes(const std::string& field) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(field + ":")) return std::stoll(line.substr(field.size() + 1)) * 1024;
  }
  throw ds::InternalError("expected " + field + " in /proc/self/status, found none");
}

// The most pages that `action` adds to those of this process.
int64_t growth_in(const std::function<void()>& action) {
  std::ofstream peak("/proc/self/clear_refs");
  peak << 5 << std::flush;  // it begins anew
  ds::require<ds::InternalError>(peak.good(), "expected to write /proc/self/clear_refs, found that it cannot be");
  const int64_t before = status_bytes("VmRSS");
  action();
  return status_bytes("VmHWM") - before;
}

double difference(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).abs().max() / b.abs().max()).item<double>();
}

void check(const Job& job, at::ScalarType dtype) {
  const std::vector<at::Tensor> plain = job.step(false);
  const std::vector<at::Tensor> chunked = job.step(true);
  const double allowed = dtype == at::kFloat ? 1e-5 : 2e-2;
  for (size_t i = 0; i < plain.size(); ++i) {
    const double off = difference(chunked[i].to(at::kFloat), plain[i].to(at::kFloat));
    ds::require<ds::InternalError>(off <= allowed, "expected the same result, found a difference of ", off);
  }
}

void measure(const Size& size, int64_t pairs) {
  const Job job(size);
  check(job, size.dtype);
  std::map<bool, std::vector<double>> times;
  std::map<bool, int64_t> memory;
  std::vector<double> ratios;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    for (const bool first : {true, false}) {
      const bool chunked = first == (pair % 2 == 0);
      times[chunked].push_back(seconds([&] { job.step(chunked); }));
    }
    ratios.push_back(times[true].back() / times[false].back());
  }
  for (const bool chunked : {false, true}) memory[chunked] = growth_in([&] { job.step(chunked); });
  const double logits = static_cast<double>(size.rows * size.vocab) * 4 / kMiB;
  std::printf("%ld rows, hidden %ld, vocabulary %ld, %s, %d thread(s), medians of %ld pairs; float32 logits %.0f MiB\n",
              size.rows, size.hidden, size.vocab, c10::toString(size.dtype), at::get_num_threads(), pairs, logits);
  std::printf("%-12s %12s %16s\n", "", "ms", "peak added, MiB");
  for (const bool chunked : {false, true}) {
    std::printf("%-12s %12.1f %16.1f\n", chunked ? "chunked" : "plain", quantile(times[chunked], 0.5) * 1e3,
                static_cast<double>(memory[chunked]) / kMiB);
  }
  std::printf("time, chunked / plain: %.3f (quartiles %.3f..%.3f); saved: %.0f MiB, %.2f times the float32 logits\n",
              quantile(ratios, 0.5), quantile(ratios, 0.25), quantile(ratios, 0.75),
              static_cast<double>(memory[false] - memory[true]) / kMiB,
              static_cast<double>(memory[false] - memory[true]) / kMiB / logits);
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, at::ScalarType> dtypes = {{"float32", at::kFloat}, {"bfloat16", at::kBFloat16}};
  CLI::App app("Chunked linear + cross-entropy beside the plain pair");
  Size size;
  int64_t pairs = 5;
  int threads = 1;
  app.add_option("--rows", size.rows)->check(CLI::PositiveNumber);
  app.add_option("--hidden", size.hidden)->check(CLI::PositiveNumber);
  app.add_option("--vocab", size.vocab)->check(CLI::PositiveNumber);
  app.add_option("--chunk_rows", size.chunk_rows, "0: the operator's choice")->check(CLI::NonNegativeNumber);
  app.add_option("--dtype", size.dtype)->transform(CLI::CheckedTransformer(dtypes));
  app.add_option("--pairs", pairs, "runs of each kind")->check(CLI::PositiveNumber);
  app.add_option("--threads", threads)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  try {
    ds::return_freed_host_memory();
    at::set_num_threads(threads);
    measure(size, pairs);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "linear_cross_entropy_bench: " << error.what() << '\n';
    return 1;
  }
}
