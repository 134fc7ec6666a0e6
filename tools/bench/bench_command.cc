// ds-tool-bench: what `ds-tool bench` runs, a program of its own because it loads LibTorch. Measures collectives
// between the ranks of a job, as nccl-tests measures and prints them.
#include <ATen/ops/tensor.h>
#include <c10/core/ScalarType.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/backend.h"
#include "comm/backends/factory.h"
#include "comm/job/rank_device.h"
#include "core/check.h"
#include "core/log.h"
#include "core/shown_text.h"
#include "dsengine/comm.h"
#include "dsengine/init_distributed.h"
#include "launcher/command_line/number_flags.h"
#include "tools/bench/bandwidth.h"
#include "tools/bench/bench_output.h"
#include "tools/bench/trial.h"
#include "tools/command_line.h"

namespace ds::tool::bench {
namespace {

constexpr int kFailed = 2;

// The flags as the command line has them.
struct BenchFlags {
  std::string operation = "all";
  std::string min = "1K", max = "64M";  // bytes of the whole tensor
  int64_t factor = 4;
  std::string dtype = "float32";
  std::string redop = "sum";
  std::string backend = "auto";
  std::string device;  // empty: cuda for nccl, else cpu
  int root = 0;
  int iterations = 20, warmup = 5;
  int64_t timeout_s = 600;
  bool check = true;
  bool json = false;
};

// The meaning of the flags.
struct BenchOptions {
  std::vector<Operation> operations;
  std::vector<int64_t> sizes;  // bytes
  at::ScalarType dtype = at::kFloat;
  comm::ReduceOp reduce_op = comm::ReduceOp::kSum;
  comm::Backend backend = comm::Backend::kAuto;
  std::string device;
};

constexpr int64_t kMostCalls = 1 << 24;  // and seconds, and ranks
constexpr std::array kDtypes = {std::pair("float32", at::kFloat),     std::pair("float64", at::kDouble),
                                std::pair("bfloat16", at::kBFloat16), std::pair("float16", at::kHalf),
                                std::pair("int8", at::kChar),         std::pair("uint8", at::kByte),
                                std::pair("int32", at::kInt),         std::pair("int64", at::kLong)};
constexpr std::array kReduceOps = {std::pair("sum", comm::ReduceOp::kSum), std::pair("min", comm::ReduceOp::kMin),
                                   std::pair("max", comm::ReduceOp::kMax)};

template <class Table>
auto entry(const Table& table, const char* flag, const std::string& name) {
  std::string known;
  for (const auto& [text, value] : table) {
    if (name == text) return value;
    known += cat(known.empty() ? "" : ", ", text);
  }
  throw ConfigError(cat(flag, ": expected one of ", known, ", found \"", name, "\""));
}

void add_flags(CLI::App& app, BenchFlags& flags) {
  app.option_defaults()->always_capture_default();
  app.add_option("operation", flags.operation,
                 "all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all, sendrecv, barrier, or all")
      ->type_name("OPERATION");
  app.add_option("--min", flags.min, "Smallest tensor, bytes: 8, 1K, 64M, 2G")->type_name("SIZE");
  app.add_option("--max", flags.max, "Largest tensor")->type_name("SIZE");
  app.add_option("--factor", flags.factor, "From one size to the next")
      ->type_name("N")
      ->transform(whole_number(2, kMostCalls));
  app.add_option("--dtype", flags.dtype, "float32, float64, bfloat16, float16, int8, uint8, int32 or int64")
      ->type_name("DTYPE");
  app.add_option("--redop", flags.redop, "sum, min or max")->type_name("OP");
  app.add_option("--backend", flags.backend, "auto, shm, gloo or nccl, as communication_backend of a ds_config")
      ->type_name("NAME");
  app.add_option("--device", flags.device, "cpu, cuda or cuda:N [cuda for nccl, else cpu]")
      ->capture_default_str()
      ->type_name("DEVICE");
  app.add_option("--root", flags.root, "Of broadcast and reduce")
      ->type_name("RANK")
      ->transform(whole_number(0, kMostCalls));
  app.add_option("--iterations", flags.iterations, "Timed calls of each size")
      ->type_name("N")
      ->transform(whole_number(1, kMostCalls));
  app.add_option("--warmup", flags.warmup, "Calls before them")->type_name("N")->transform(whole_number(0, kMostCalls));
  app.add_option("--timeout", flags.timeout_s, "Seconds that a rank waits for another")
      ->type_name("S")
      ->transform(whole_number(1, kMostCalls));
  app.add_flag("--check,!--no_check", flags.check, "Compare the results of each size with what they must be")
      ->default_str("on");
  app.add_flag("--json", flags.json, "Print one JSON object");
}

// Throws ConfigError that names the flag.
BenchOptions resolve(const BenchFlags& flags) {
  BenchOptions options;
  options.operations = parse_operations(flags.operation);
  options.sizes = size_steps(parse_size(flags.min, "--min"), parse_size(flags.max, "--max"), flags.factor);
  options.dtype = entry(kDtypes, "--dtype", flags.dtype);
  options.reduce_op = entry(kReduceOps, "--redop", flags.redop);
  options.backend = comm::parse_backend(flags.backend);
  const bool nccl = options.backend == comm::Backend::kNccl;
  options.device = flags.device.empty() ? (nccl ? "cuda" : "cpu") : flags.device;
  return options;
}

// The ranks, and where they are.
struct Job {
  std::shared_ptr<comm::Communicator> ranks;
  at::Device device = at::kCPU;
  BenchSetting setting;
};

Job join(const BenchFlags& flags, const BenchOptions& options) {
  const comm::Rendezvous meeting = comm::rendezvous({.timeout = std::chrono::seconds(flags.timeout_s)});
  require<ConfigError>(flags.root < meeting.world_size, "--root: expected a rank below ", meeting.world_size,
                       ", found ", flags.root);
  Job job;
  job.device = engine::device_of_rank(options.device, meeting.local_rank);
  log::set_rank(meeting.rank, meeting.world_size);
  const comm::BackendChoice choice = comm::choose_backend(meeting, job.device.type(), options.backend);
  job.ranks = comm::make_communicator(meeting, job.device, options.backend);
  job.setting = {.version = DS_VERSION,
                 .choice = choice.reason,
                 .device = c10::DeviceTypeName(job.device.type(), true),
                 .ranks = meeting.descriptions(),
                 .hosts = static_cast<int>(meeting.hosts().size()),
                 .dtype = flags.dtype,
                 .redop = flags.redop,
                 .root = flags.root,
                 .iterations = flags.iterations,
                 .warmup = flags.warmup};
  return job;
}

Measurement measure(const Job& job, const TrialOptions& options, const Amount& amount, const BenchFlags& flags) {
  Trial trial(*job.ranks, options);
  const double own_time = trial.time(flags.warmup, flags.iterations);
  const int64_t own_wrong = flags.check ? trial.count_wrong() : 0;
  const at::Tensor sums = at::tensor({own_time, static_cast<double>(own_wrong)}, at::kDouble).to(job.device);
  job.ranks->all_reduce(sums).wait();
  const at::Tensor on_host = sums.to(at::kCPU);
  Measurement measured;
  measured.microseconds = on_host[0].item<double>() / job.ranks->size();
  measured.algbw = algorithm_bandwidth(amount.bytes, measured.microseconds / 1e6);
  measured.busbw = measured.algbw * bus_factor(options.operation, job.ranks->size());
  // A broken all_reduce shall not hide what this rank saw.
  if (flags.check) measured.wrong = std::max(own_wrong, on_host[1].item<int64_t>());
  return measured;
}

Row measure_row(const Job& job, Operation operation, int64_t bytes, const BenchFlags& flags,
                const BenchOptions& options) {
  Row row{.operation = operation};
  row.amount = amount_of(operation, bytes, static_cast<int64_t>(c10::elementSize(options.dtype)), job.ranks->size());
  for (const bool in_place : {false, true}) {
    if (!is_offered(operation, in_place)) continue;
    const TrialOptions trial{.operation = operation,
                             .count = row.amount.count,
                             .in_place = in_place,
                             .dtype = options.dtype,
                             .device = job.device,
                             .reduce_op = options.reduce_op,
                             .root = flags.root};
    (in_place ? row.in_place : row.out_of_place) = measure(job, trial, row.amount, flags);
  }
  return row;
}

int bench(const BenchFlags& flags, std::ostream& out) {
  const BenchOptions options = resolve(flags);
  const Job job = join(flags, options);
  const bool speaks = job.ranks->rank() == 0;
  const bool table = speaks && !flags.json;
  if (table) print_setting(job.setting, out);
  std::vector<Row> rows;
  for (const Operation operation : options.operations) {
    if (table) print_heading(operation, out);
    const std::vector<int64_t> sizes = operation == Operation::kBarrier ? std::vector<int64_t>{0} : options.sizes;
    for (const int64_t bytes : sizes) {
      rows.push_back(measure_row(job, operation, bytes, flags, options));
      if (table) print_row(rows.back(), job.setting, out);
    }
  }
  if (table) print_summary(rows, out);
  if (speaks && flags.json) print_json(job.setting, rows, out);
  require<IoError>(!speaks || out.good(), "the table cannot be written; check the disk or the program that reads it");
  return exit_code_of(rows);
}

// Runs the command line, on every rank. Rank 0 prints to `out`; errors go to `err`. Returns the exit code: 0 fine, 1 a
// result was wrong, 2 wrong usage, or ranks could not talk.
int run(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  CLI::App app(
      "Measures collectives between the ranks of a job, and checks their results. Under ds-launch (ds-launch "
      "--num_procs 4 ds-tool bench all_reduce) or torchrun; alone it has one rank. Sizes and bandwidths are counted as "
      "in nccl-tests. Exit code 0: fine; 1: a result was wrong; 2: wrong usage, or ranks could not talk.",
      "ds-tool bench");
  BenchFlags flags;
  add_flags(app, flags);
  if (const auto code = parse_command_line(app, argc, argv, out, err)) return *code;
  try {
    return bench(flags, out);
  } catch (const std::exception& error) {
    err << "ds-tool bench: " << shown_message(error.what()) << '\n';
    return kFailed;
  }
}

}  // namespace
}  // namespace ds::tool::bench

int main(int argc, char** argv) { return ds::tool::bench::run(argc, argv, std::cout, std::cerr); }
