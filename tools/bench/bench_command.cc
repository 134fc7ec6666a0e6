#include "tools/bench/bench_command.h"

#include <ATen/ops/tensor.h>

#include <chrono>
#include <sstream>
#include <utility>

#include "comm/backends/factory.h"
#include "comm/job/rank_device.h"
#include "core/check.h"
#include "core/log.h"
#include "core/shown_text.h"
#include "dsengine/init_distributed.h"
#include "tools/bench/bench_options.h"
#include "tools/bench/bench_output.h"
#include "tools/bench/trial.h"

namespace ds::tool::bench {
namespace {

constexpr int kFine = 0;
constexpr int kFailed = 2;

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

}  // namespace

int run(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  CLI::App app(
      "Measures collectives between the ranks of a job, and checks their results. Under ds-launch (ds-launch "
      "--num_procs 4 ds-tool bench all_reduce) or torchrun; alone it has one rank. Sizes and bandwidths are counted as "
      "in nccl-tests. Exit code 0: fine; 1: a result was wrong; 2: wrong usage, or ranks could not talk.",
      "ds-tool bench");
  BenchFlags flags;
  add_flags(app, flags);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::ostringstream text;
    const int code = app.exit(error, out, text);
    err << shown_message(text.str());
    return code == 0 ? kFine : kFailed;
  }
  try {
    return bench(flags, out);
  } catch (const std::exception& error) {
    err << "ds-tool bench: " << shown_message(error.what()) << '\n';
    return kFailed;
  }
}

}  // namespace ds::tool::bench
