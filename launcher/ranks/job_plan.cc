#include "launcher/ranks/job_plan.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "core/check.h"
#include "core/secret/job_secret.h"
#include "launcher/command_line/core_list.h"
#include "launcher/machine/accelerators.h"
#include "launcher/machine/core_binding.h"
#include "launcher/machine/rendezvous_port.h"
#include "launcher/processes/orphan_guard.h"
#include "launcher/program/program_path.h"
#include "launcher/program/rank_environment.h"
#include "launcher/ranks/failure_report.h"

namespace ds::launcher {
namespace {

std::vector<std::vector<int>> bind_cores(const Options& options, const std::vector<Core>& cores, int ranks) {
  if (!options.bind_cores) return {};
  return options.bind_core_list.empty() ? split_cores(cores, ranks)
                                        : split_core_list(options.bind_core_list, cores, ranks);
}

// Whether each rank stands for a GPU. --num_procs counts processes, which may use none, or share them.
bool has_ranks_of_gpus(const Options& options, const std::optional<std::vector<int>>& slots) {
  return slots || options.count_is_gpus || !options.num_procs;
}

// `cores`, but no more than the control group's quota of CPU time.
int within_quota(size_t cores, const std::filesystem::path& root = "/") {
  const int quota = cpu_quota(root);
  return quota > 0 ? std::min(static_cast<int>(cores), quota) : static_cast<int>(cores);
}

// Cores that threads can really use: physical ones.
int usable_cores(const std::vector<Core>& cores) { return within_quota(physical_cores(cores).size()); }

GpuList gpus_here(const std::vector<std::string>& environment) {
  return visible_gpus(environment_value(environment, "CUDA_VISIBLE_DEVICES"), count_gpu_devices());
}

JobEnvironment job_environment(const Options& options, const std::optional<NodePlace>& place, Notices& notices) {
  JobEnvironment job{
      .master_addr = {}, .master_port = 0, .cuda_visible_devices = {}, .launch_id = new_launch_id(), .flight_job = {}};
  job.flight_job = place && !place->flight_job.empty() ? place->flight_job : job.launch_id;
  if (place) {
    job.master_addr = place->master_addr;
    job.master_port = place->master_port;
    return job;  // hosts agree on a secret, or have none
  }
  job.secret = new_job_secret();
  job.master_addr = options.master_addr.empty() ? "127.0.0.1" : options.master_addr;
  if (!options.master_addr.empty()) require_own_address(job.master_addr);
  const MasterPort port = choose_master_port(options.master_port);
  if (port.replaced_default) {
    notices.info("port ", kDefaultMasterPort, " is in use: rank 0 listens on the free port ", port.port,
                 " instead (--master_port chooses one)");
  }
  job.master_port = port.port;
  return job;
}

int choose_ranks(const Options& options, const GpuList& gpus, const std::optional<std::vector<int>>& slots,
                 Notices& notices) {
  if (slots) return static_cast<int>(slots->size());
  const auto [ranks, note] = choose_rank_count(options.num_procs, options.count_is_gpus, gpus);
  if (!note.empty()) notices.info(note);
  return ranks;
}

std::string temporary_file(const std::string& name) {
  std::error_code none;  // a TMPDIR that does not exist
  const std::filesystem::path temporary = std::filesystem::temp_directory_path(none);
  return (none ? "/tmp" : temporary) / name;
}

}  // namespace

std::string find_program_in(const Options& options, const std::vector<std::string>& environment) {
  return find_program(options.program, search_path(environment));
}

int count_local_gpus(const std::vector<std::string>& environment) {
  return static_cast<int>(gpus_here(environment).size());
}

int count_local_cores(const std::filesystem::path& root) { return within_quota(allowed_cores().size(), root); }

int count_local_slots(const std::vector<std::string>& environment) {
  const int gpus = count_local_gpus(environment);
  return gpus > 0 ? gpus : static_cast<int>(allowed_cores().size());
}

int count_ranks_here(const Options& options, const std::vector<std::string>& environment) {
  return choose_rank_count(options.num_procs, options.count_is_gpus, gpus_here(environment)).ranks;
}

std::string check_slots(const std::vector<int>& slots, const std::vector<std::string>& environment) {
  const GpuList gpus = gpus_here(environment);
  gpus_of_slots(gpus, slots);
  const size_t cores = allowed_cores().size();
  if (!gpus.empty() || slots.size() <= cores) return "";
  return cat(slots.size(), " ranks share ", cores, cores == 1 ? " core" : " cores");
}

JobPlan plan_job(const Options& options, const std::vector<std::string>& environment,
                 const std::optional<std::vector<int>>& slots, const std::optional<NodePlace>& place,
                 Notices& notices) {
  JobPlan plan;
  plan.file = find_program_in(options, environment);
  plan.words = options.arguments;
  plan.words.insert(plan.words.begin(), options.program);

  const GpuList visible = gpus_here(environment);
  const GpuList gpus = slots ? gpus_of_slots(visible, *slots) : visible;
  const int ranks = choose_ranks(options, gpus, slots, notices);
  const std::vector<Core> cores = allowed_cores();
  plan.cpus = bind_cores(options, cores, ranks);
  const int bound = plan.cpus.empty() ? 0 : static_cast<int>(plan.cpus.front().size());
  int for_threads = usable_cores(cores);
  if (plan.cpus.empty() && options.bind_to_gpu_node && has_ranks_of_gpus(options, slots)) {
    plan.cpus = cores_beside_gpus(nodes_of_gpus(gpus), cores, ranks);
    // Nodes may have more ranks than others.
    if (!plan.cpus.empty()) for_threads = std::min(for_threads, cores_per_sharing_rank(plan.cpus, cores) * ranks);
  }
  JobEnvironment job = job_environment(options, place, notices);
  job.cuda_visible_devices = devices_of_ranks(gpus, ranks);
  job.joined_file = temporary_file(cat("ds-launch.", job.launch_id, ".joined"));
  const std::optional<int> threads = omp_threads(environment, for_threads, ranks, bound);
  if (place) {
    plan.first_rank = place->first_rank;
    plan.host = place->host;
  }
  for (int rank = 0; rank < ranks; ++rank) {
    const RankPlace of_rank{.rank = plan.first_rank + rank,
                            .world_size = place ? place->world_size : ranks,
                            .local_rank = rank,
                            .local_size = ranks,
                            .cross_rank = place ? place->node : 0,
                            .cross_size = place ? place->nodes : 1};
    plan.environments.push_back(rank_environment(environment, job, of_rank, threads));
    plan.joined_files.push_back(joined_file_of(job, of_rank.rank));
    if (!plan.cpus.empty()) {
      notices.info("rank ", of_rank.rank, " is bound to cores ", core_list_text(plan.cpus[static_cast<size_t>(rank)]));
    }
  }
  plan.launch_id = job.launch_id;
  plan.flight_folder = flight_folder(plan.environments.front());
  plan.rank_log_dir = options.rank_log_dir;
  plan.failure_grace_seconds = options.failure_grace_seconds;
  plan.signal_grace_seconds = options.signal_grace_seconds;
  notices.say(place ? Verbosity::kDebug : Verbosity::kInfo, ranks, ranks == 1 ? " rank of " : " ranks of ",
              options.program, ", ", job.master_addr, ':', job.master_port, ", ",
              threads ? cat("OMP_NUM_THREADS=", *threads) : std::string("OMP_NUM_THREADS as given"),
              job.cuda_visible_devices ? cat(", CUDA_VISIBLE_DEVICES=", *job.cuda_visible_devices) : std::string());
  return plan;
}

}  // namespace ds::launcher
