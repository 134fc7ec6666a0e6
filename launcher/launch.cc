#include "launcher/launch.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>

#include "core/check.h"
#include "launcher/accelerators.h"
#include "launcher/console.h"
#include "launcher/core_binding.h"
#include "launcher/core_list.h"
#include "launcher/job.h"
#include "launcher/notices.h"
#include "launcher/options.h"
#include "launcher/program_path.h"
#include "launcher/rank_environment.h"
#include "launcher/rendezvous_port.h"

namespace ds::launcher {
namespace {

constexpr int kWrongSetting = 2;
constexpr double kLastWriteSeconds = 5;  // for a reader that is slow to take the report

std::string new_launch_id() { return cat(getpid(), '.', std::chrono::system_clock::now().time_since_epoch().count()); }

std::vector<std::vector<int>> bind_cores(const Options& options, const std::vector<Core>& cores, int ranks) {
  if (!options.bind_cores) return {};
  return options.bind_core_list.empty() ? split_cores(cores, ranks)
                                        : split_core_list(options.bind_core_list, cores, ranks);
}

// Cores that threads can really use: physical ones, no more than the control group's quota of CPU time.
int usable_cores(const std::vector<Core>& cores) {
  const int physical = static_cast<int>(physical_cores(cores).size());
  const int quota = cpu_quota();
  return quota > 0 ? std::min(physical, quota) : physical;
}

JobEnvironment job_environment(const Options& options, const GpuList& gpus, int ranks, Notices& notices) {
  const std::string address = options.master_addr.empty() ? "127.0.0.1" : options.master_addr;
  if (!options.master_addr.empty()) require_own_address(address);
  const MasterPort port = choose_master_port(options.master_port);
  if (port.replaced_default) {
    notices.info("port ", kDefaultMasterPort, " is in use: rank 0 listens on the free port ", port.port,
                 " instead (--master_port chooses one)");
  }
  return {.master_addr = address,
          .master_port = port.port,
          .cuda_visible_devices = devices_of_ranks(gpus, ranks),
          .launch_id = new_launch_id()};
}

JobPlan make_plan(const Options& options, const std::vector<std::string>& environment, Notices& notices) {
  JobPlan plan;
  plan.file =
      find_program(options.program, environment_value(environment, "PATH").value_or("/usr/local/bin:/usr/bin:/bin"));
  plan.words = options.arguments;
  plan.words.insert(plan.words.begin(), options.program);

  const GpuList gpus = visible_gpus(environment_value(environment, "CUDA_VISIBLE_DEVICES"), count_gpu_devices());
  const auto [ranks, note] = choose_rank_count(options.num_procs, options.count_is_gpus, gpus);
  if (!note.empty()) notices.info(note);

  const std::vector<Core> cores = allowed_cores();
  plan.cpus = bind_cores(options, cores, ranks);
  const JobEnvironment job = job_environment(options, gpus, ranks, notices);
  const int bound = plan.cpus.empty() ? 0 : static_cast<int>(plan.cpus.front().size());
  const std::optional<int> threads = omp_threads(environment, usable_cores(cores), ranks, bound);
  for (int rank = 0; rank < ranks; ++rank) {
    const RankPlace place{.rank = rank, .world_size = ranks, .local_rank = rank, .local_size = ranks};
    plan.environments.push_back(rank_environment(environment, job, place, threads));
    if (!plan.cpus.empty()) {
      notices.info("rank ", rank, " is bound to cores ", core_list_text(plan.cpus[static_cast<size_t>(rank)]));
    }
  }
  plan.launch_id = job.launch_id;
  plan.rank_log_dir = options.rank_log_dir;
  plan.failure_grace_seconds = options.failure_grace_seconds;
  plan.signal_grace_seconds = options.signal_grace_seconds;
  notices.info(ranks, ranks == 1 ? " rank of " : " ranks of ", options.program, ", ", job.master_addr, ':',
               job.master_port, ", ",
               threads ? cat("OMP_NUM_THREADS=", *threads) : std::string("OMP_NUM_THREADS as given"),
               job.cuda_visible_devices ? cat(", CUDA_VISIBLE_DEVICES=", *job.cuda_visible_devices) : std::string());
  return plan;
}

int run_job(const Options& options, const std::vector<std::string>& environment, Console& console) {
  Notices notices(console, options.verbosity);
  try {
    Job job(make_plan(options, environment, notices), console, notices);
    return job.run();
  } catch (const ProgramError& error) {
    notices.error(error.what());
    return error.exit_code();
  } catch (const Error& error) {
    notices.error(error.what());
    return kWrongSetting;
  }
}

}  // namespace

int launch(const std::vector<std::string>& words, const std::vector<std::string>& environment) {
  signal(SIGPIPE, SIG_IGN);  // a reader that is gone must not end the training; ranks get the default back
  Console console(STDOUT_FILENO, STDERR_FILENO);
  int result = 0;
  try {
    const Options options = parse_options(words);
    if (options.answer) {
      console.raw(Console::kOut, *options.answer);
    } else {
      result = run_job(options, environment, console);
    }
  } catch (const ConfigError& error) {
    Notices(console, Verbosity::kError).error(error.what());
    result = kWrongSetting;
  }
  console.finish(kLastWriteSeconds);
  return result;
}

}  // namespace ds::launcher
