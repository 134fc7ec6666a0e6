// The environment variables of a rank. Pure.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ds::launcher {

// A rank among all, on its machine, and its machine among all (today always 0 of 1).
struct RankPlace {
  int rank = 0, world_size = 1;
  int local_rank = 0, local_size = 1;
  int cross_rank = 0, cross_size = 1;
};

// The values that all ranks of a job share.
struct JobEnvironment {
  std::string master_addr;
  int master_port = 0;
  std::optional<std::string> cuda_visible_devices;  // absent: leave the inherited one
  std::string launch_id;                            // marks every process of this job, see orphan_guard.h
  std::string flight_job;                           // the same on all hosts: names the folder of flight records
  std::string joined_file;                          // core/files/joined_file.h, without the rank's number; empty: none
  std::string secret;                               // core/secret/job_secret.h; empty: the inherited one, or none
};

// The variable that holds launch ids, one for each ds-launch above the process, joined with commas.
inline constexpr std::string_view kLaunchIdVariable = "DS_LAUNCH_ID";

// The value of `name` in an environment of "NAME=value" entries.
std::optional<std::string> environment_value(const std::vector<std::string>& environment, std::string_view name);
// The value of PATH, or the usual folders where it is not set.
std::string search_path(const std::vector<std::string>& environment);
// The value of DS_JOINED_FILE for a rank.
std::string joined_file_of(const JobEnvironment& job, int rank);
// The value of DS_LAUNCH_ID for processes that a ds-launch with this environment and id starts.
std::string launch_ids(const std::vector<std::string>& environment, const std::string& own);

// The value of OMP_NUM_THREADS for a rank: cores / ranks, at least 1; absent when the user has set it. With bound cores
// it is always their number, as DeepSpeed does.
std::optional<int> omp_threads(const std::vector<std::string>& inherited, int cores, int ranks, int bound_cores);

// `inherited` with the variables of the rank set: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_SIZE, LOCAL_WORLD_SIZE,
// CROSS_RANK, CROSS_SIZE, MASTER_ADDR, MASTER_PORT, DS_LAUNCH_ID, DS_FLIGHT_JOB, and DS_JOINED_FILE, DS_JOB_SECRET,
// OMP_NUM_THREADS and CUDA_VISIBLE_DEVICES where given; with the last CUDA_DEVICE_MAX_CONNECTIONS and
// PYTORCH_ALLOC_CONF where not set; without what an outer launcher has set for its own ranks.
std::vector<std::string> rank_environment(std::vector<std::string> inherited, const JobEnvironment& job,
                                          const RankPlace& place, const std::optional<int>& threads);

}  // namespace ds::launcher
