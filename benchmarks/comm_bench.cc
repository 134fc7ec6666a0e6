// Speed of collectives between processes of this host: shared memory beside gloo.
//
//   comm_bench [--ranks 2] [--mib 64] [--seconds 1] [--dtype float32|bfloat16]
//
// Starts the ranks itself. Each operation is warmed up, checked once against its definition, then repeated for at least
// --seconds; every rank holds --mib in its whole tensor. GB/s = bytes of the whole tensor / median time, 1 GB = 10^9.
// "gloo" is this library's gloo communicator, "gloo's own" the algorithms of ProcessGroupGloo.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "comm/gloo/gloo_backend.h"
#include "comm/gloo/gloo_communicator.h"
#include "comm/shared_memory/shared_memory_communicator.h"
#include "core/check.h"

extern char** environ;

namespace {

using Clock = std::chrono::steady_clock;
using ds::comm::Communicator;

struct Options {
  int ranks = 2;
  int64_t mib = 64;
  double seconds = 1.0;
  std::string dtype = "float32";
  int rank = -1;  // -1: the process that starts the ranks
  std::string meeting;
};

// The operations under test, each on tensors of its own making.
struct Transport {
  std::string name;
  std::function<void(at::Tensor&)> all_reduce;
  std::function<void(at::Tensor&, at::Tensor&)> reduce_scatter;  // output, input
  std::function<void(at::Tensor&, at::Tensor&)> all_gather;      // output, input
};

Transport over(const std::string& name, const std::shared_ptr<Communicator>& communicator) {
  return {name, [=](at::Tensor& tensor) { communicator->all_reduce(tensor).wait(); },
          [=](at::Tensor& output, at::Tensor& input) { communicator->reduce_scatter(output, input).wait(); },
          [=](at::Tensor& output, at::Tensor& input) { communicator->all_gather(output, input).wait(); }};
}

Transport over_gloo_itself(const c10::intrusive_ptr<c10d::Backend>& gloo) {
  return {"gloo's own",
          [=](at::Tensor& tensor) {
            std::vector<at::Tensor> tensors{tensor};
            gloo->allreduce(tensors)->wait();
          },
          [=](at::Tensor& output, at::Tensor& input) { gloo->_reduce_scatter_base(output, input)->wait(); },
          [=](at::Tensor& output, at::Tensor& input) { gloo->_allgather_base(output, input)->wait(); }};
}

// Seconds, median over at least `limit` seconds; the same number of turns on every rank.
double median_seconds(Communicator& clock, double limit, const std::function<void()>& body) {
  body();
  std::vector<double> times;
  double total = 0;
  at::Tensor more = at::ones({1});
  while (more.item<float>() > 0) {
    clock.barrier();
    const auto start = Clock::now();
    body();
    times.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    total += times.back();
    more.fill_(total < limit || times.size() < 5 ? 1.0 : 0.0);
    clock.all_reduce(more, ds::comm::ReduceOp::kMin).wait();
  }
  std::nth_element(times.begin(), times.begin() + static_cast<int64_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

void check(const Transport& transport, const at::Tensor& tensor, double wanted, const char* operation) {
  ds::require<ds::InternalError>((tensor == wanted).all().item<bool>(), transport.name, " ", operation,
                                 " gives a wrong result");
}

void measure(const Transport& transport, Communicator& clock, const Options& options, at::ScalarType dtype) {
  const int64_t numel = (options.mib << 20) / static_cast<int64_t>(c10::elementSize(dtype)) / options.ranks;
  at::Tensor whole = at::ones({numel * options.ranks}, dtype);
  at::Tensor part = at::zeros({numel}, dtype);
  transport.all_reduce(whole);
  check(transport, whole, options.ranks, "all_reduce");
  transport.reduce_scatter(part, whole);
  check(transport, part, options.ranks * options.ranks, "reduce_scatter");
  part.fill_(1.0);
  transport.all_gather(whole, part);
  check(transport, whole, 1.0, "all_gather");

  const auto bytes = static_cast<double>(whole.nbytes());
  whole.zero_();
  const auto rate = [&](const std::function<void()>& body) {
    return bytes / median_seconds(clock, options.seconds, body) / 1e9;
  };
  const double all_reduce = rate([&] { transport.all_reduce(whole); });
  const double reduce_scatter = rate([&] { transport.reduce_scatter(part, whole); });
  const double all_gather = rate([&] { transport.all_gather(whole, part); });
  at::Tensor scalar = at::zeros({1}, dtype);
  const double delay = median_seconds(clock, options.seconds / 4, [&] { transport.all_reduce(scalar); }) * 1e6;
  if (options.rank == 0) {
    std::printf("%-14s %12.2f %16.2f %12.2f %14.1f\n", transport.name.c_str(), all_reduce, reduce_scatter, all_gather,
                delay);
    std::fflush(stdout);
  }
}

void run_rank(const Options& options) {
  const auto store = c10::make_intrusive<c10d::FileStore>(options.meeting, options.ranks);
  const at::ScalarType dtype = options.dtype == "bfloat16" ? at::kBFloat16 : at::kFloat;
  const auto shared = ds::comm::make_shared_memory_communicator(
      {.store = store, .rank = options.rank, .size = options.ranks, .name = "bench"});
  const auto gloo = ds::comm::make_gloo_communicator(
      {.store = c10::make_intrusive<c10d::PrefixStore>("direct", store), .rank = options.rank, .size = options.ranks});
  const auto own = ds::comm::connect_gloo(c10::make_intrusive<c10d::PrefixStore>("own", store), options.rank,
                                          options.ranks, ds::comm::GlooOptions{});
  if (options.rank == 0) {
    std::printf("%d ranks, %ld MiB %s, GB/s\n%-14s %12s %16s %12s %14s\n", options.ranks, options.mib,
                options.dtype.c_str(), "", "all_reduce", "reduce_scatter", "all_gather", "scalar, us");
  }
  measure(over("shared memory", shared), *shared, options, dtype);
  measure(over("gloo", gloo), *shared, options, dtype);
  measure(over_gloo_itself(own), *shared, options, dtype);
}

int start_ranks(const Options& options, const char* program) {
  std::string folder = (std::filesystem::temp_directory_path() / "comm_bench_XXXXXX").string();
  ds::require<ds::IoError>(mkdtemp(folder.data()) != nullptr, "cannot make a folder ", folder);
  std::vector<pid_t> children;
  for (int rank = 0; rank < options.ranks; ++rank) {
    std::vector<std::string> words = {program,
                                      "--ranks=" + std::to_string(options.ranks),
                                      "--mib=" + std::to_string(options.mib),
                                      "--seconds=" + std::to_string(options.seconds),
                                      "--dtype=" + options.dtype,
                                      "--rank=" + std::to_string(rank),
                                      "--meeting=" + folder + "/store"};
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    pid_t child = 0;
    ds::require<ds::IoError>(posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, arguments.data(), environ) == 0,
                             "cannot start rank ", rank);
    children.push_back(child);
  }
  int failures = 0;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    failures += status != 0 ? 1 : 0;
  }
  std::filesystem::remove_all(folder);
  return failures == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Speed of collectives between processes of this host");
  Options options;
  app.add_option("--ranks", options.ranks, "processes")->check(CLI::Range(2, 64));
  app.add_option("--mib", options.mib, "size of the whole tensor, MiB")->check(CLI::Range(1, 4096));
  app.add_option("--seconds", options.seconds, "least time per measurement");
  app.add_option("--dtype", options.dtype)->check(CLI::IsMember({"float32", "bfloat16"}));
  app.add_option("--rank", options.rank)->group("");
  app.add_option("--meeting", options.meeting)->group("");
  CLI11_PARSE(app, argc, argv);
  try {
    at::set_num_threads(1);
    if (options.rank < 0) return start_ranks(options, argv[0]);
    run_rank(options);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "comm_bench: " << error.what() << '\n';
    return 1;
  }
}
