#include "launcher/program/rank_environment.h"

#include <algorithm>

#include "core/files/joined_file.h"
#include "core/flight_job.h"
#include "core/restart_request.h"
#include "core/secret/job_secret.h"
#include "core/text.h"

namespace ds::launcher {
namespace {

bool names(std::string_view entry, std::string_view name) {
  return entry.size() > name.size() && entry.starts_with(name) && entry[name.size()] == '=';
}

void set(std::vector<std::string>& environment, std::string_view name, const std::string& value) {
  std::erase_if(environment, [&](const std::string& entry) { return names(entry, name); });
  environment.push_back(cat(name, '=', value));
}

// For ranks with GPUs, where the user says nothing. An engine has ten streams and more, and with the usual 8 queues of
// the hardware a product can wait behind a message that waits for another rank. Buckets that come and go among
// activations leave holes in memory that cannot grow.
void set_for_gpus(std::vector<std::string>& environment) {
  const auto unset = [&](std::string_view name) { return !environment_value(environment, name); };
  if (unset("CUDA_DEVICE_MAX_CONNECTIONS")) set(environment, "CUDA_DEVICE_MAX_CONNECTIONS", "32");
  if (unset("PYTORCH_ALLOC_CONF") && unset("PYTORCH_CUDA_ALLOC_CONF")) {
    set(environment, "PYTORCH_ALLOC_CONF", "expandable_segments:True");
  }
}

}  // namespace

std::optional<std::string> environment_value(const std::vector<std::string>& environment, std::string_view name) {
  for (const std::string& entry : environment) {
    if (names(entry, name)) return entry.substr(name.size() + 1);
  }
  return std::nullopt;
}

std::string search_path(const std::vector<std::string>& environment) {
  return environment_value(environment, "PATH").value_or("/usr/local/bin:/usr/bin:/bin");
}

std::string joined_file_of(const JobEnvironment& job, int rank) { return cat(job.joined_file, '.', rank); }

std::string launch_ids(const std::vector<std::string>& environment, const std::string& own) {
  const std::string above = environment_value(environment, kLaunchIdVariable).value_or("");
  return above.empty() ? own : cat(above, ',', own);
}

std::optional<int> omp_threads(const std::vector<std::string>& inherited, int cores, int ranks, int bound_cores) {
  if (bound_cores > 0) return bound_cores;
  if (!environment_value(inherited, "OMP_NUM_THREADS").value_or("").empty()) return std::nullopt;
  return std::max(1, cores / ranks);
}

std::vector<std::string> rank_environment(std::vector<std::string> inherited, const JobEnvironment& job,
                                          const RankPlace& place, const std::optional<int>& threads) {
  std::vector<std::string>& environment = inherited;
  // The ranks of a ds-launch inside a torchrun do not meet in the store of torchrun's agent, and those of one inside a
  // ds-launch do not end when the outer one would like to start again.
  std::erase_if(environment, [](const std::string& entry) {
    return names(entry, "TORCHELASTIC_USE_AGENT_STORE") || names(entry, kRestartFileVariable) ||
           names(entry, kJoinedFileVariable);
  });
  set(environment, "RANK", cat(place.rank));
  set(environment, "WORLD_SIZE", cat(place.world_size));
  set(environment, "LOCAL_RANK", cat(place.local_rank));
  set(environment, "LOCAL_SIZE", cat(place.local_size));
  set(environment, "LOCAL_WORLD_SIZE", cat(place.local_size));
  set(environment, "CROSS_RANK", cat(place.cross_rank));
  set(environment, "CROSS_SIZE", cat(place.cross_size));
  set(environment, "MASTER_ADDR", job.master_addr);
  set(environment, "MASTER_PORT", cat(job.master_port));
  if (threads) set(environment, "OMP_NUM_THREADS", cat(*threads));
  if (job.cuda_visible_devices) {
    set(environment, "CUDA_VISIBLE_DEVICES", *job.cuda_visible_devices);
    set_for_gpus(environment);
  }
  set(environment, kLaunchIdVariable, launch_ids(environment, job.launch_id));
  set(environment, kFlightJobVariable, job.flight_job);
  if (!job.secret.empty()) set(environment, kJobSecretVariable, job.secret);
  if (!job.joined_file.empty()) set(environment, kJoinedFileVariable, joined_file_of(job, place.rank));
  return inherited;
}

}  // namespace ds::launcher
