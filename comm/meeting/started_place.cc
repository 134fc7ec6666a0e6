#include "comm/meeting/started_place.h"

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string_view>
#include <vector>

#include "comm/meeting/environment_reader.h"
#include "core/check.h"
#include "core/text.h"
#include "core/text_hash.h"

namespace ds::comm {
namespace {

constexpr const char* kLoopback = "127.0.0.1";
constexpr int kUsualPort = 29500;  // where nothing names the job
// Below the ports that Linux gives to outgoing connections (from 32768 on).
constexpr uint64_t kFirstPort = 20000;
constexpr uint64_t kPorts = 12000;
constexpr uint64_t kStepsApart = 16;  // steps of a job that run at once get different ports, up to so many

int port_of(uint64_t job) { return static_cast<int>(kFirstPort + job % kPorts); }

// The leading digits of a number that may not fit an int (step 4294967290 is an interactive shell).
uint64_t digits(const std::optional<std::string>& text) {
  uint64_t value = 0;
  for (const char c : text.value_or("")) {
    if (c < '0' || c > '9') break;
    value = value * 10 + static_cast<uint64_t>(c - '0');
  }
  return value;
}

// The two variables without which there is no place. Both absent: false.
bool has_rank_and_size(const EnvironmentReader& environment, const char* rank, const char* size, StartedPlace& place) {
  const auto found_rank = integer_variable(environment, rank);
  const auto found_size = integer_variable(environment, size);
  if (!found_rank && !found_size) return false;
  place.rank_variables = cat(rank, ", ", size);
  require<ConfigError>(found_rank && found_size, "environment: ", found_rank ? rank : size, " is set, but ",
                       found_rank ? size : rank, " is missing; ", place.starter, " sets both. Unset the one, or set ",
                       "RANK and WORLD_SIZE");
  place.rank = *found_rank;
  place.world_size = *found_size;
  return true;
}

std::optional<StartedPlace> by_slurm(const EnvironmentReader& environment) {
  if (!environment("SLURM_STEP_ID") || !environment("SLURM_STEP_NUM_TASKS")) return std::nullopt;
  StartedPlace place{.starter = "SLURM"};
  if (!has_rank_and_size(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", place)) return std::nullopt;
  place.local_rank = integer_variable(environment, "SLURM_LOCALID");
  if (const auto tasks = environment("SLURM_STEP_TASKS_PER_NODE")) {
    place.local_world_size = slurm_tasks_on_node(*tasks, integer_variable(environment, "SLURM_NODEID").value_or(0),
                                                 "environment variable SLURM_STEP_TASKS_PER_NODE");
  }
  place.port = port_of(kStepsApart * digits(environment("SLURM_JOB_ID")) + digits(environment("SLURM_STEP_ID")));
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}) {
    const auto list = environment(name);
    if (list && place.host.empty()) place.host = first_slurm_host(*list, cat("environment variable ", name));
  }
  if (environment("SLURM_STEP_NUM_NODES") == "1") place.host = kLoopback;
  place.why_no_host = "SLURM_STEP_NODELIST is missing. Set MASTER_ADDR to the host of task 0";
  return place;
}

// "1232928768.0;tcp://10.0.0.1,10.1.0.1:54565;tcp6://[fd00::2]:35913" -> the addresses of IPv4. 127.x are left out.
std::vector<std::string> addresses_of_uri(const std::string& uri) {
  constexpr std::string_view kScheme = ";tcp://";
  const size_t scheme = uri.find(kScheme);
  if (scheme == std::string::npos) return {};
  const size_t first = scheme + kScheme.size();
  const std::string list = uri.substr(first, uri.find(':', first) - first);
  std::vector<std::string> addresses;
  for (size_t begin = 0; begin < list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    const std::string address = list.substr(begin, end - begin);
    if (!address.starts_with("127.")) addresses.push_back(address);
    begin = end + 1;
  }
  return addresses;
}

// Where mpirun of Open MPI runs, and whether this process is there too.
struct MpirunHost {
  std::vector<std::string> names;  // or addresses
  std::string said_by;             // for messages
  bool is_here = false;
};

// Version 4 has OMPI_MCA_orte_hnp_uri, with addresses. Version 5 calls the job prterun-HOST-PID@1, and the daemon that
// this process talks to prterun-HOST-PID@0.N, where 0 is that of mpirun.
std::optional<MpirunHost> find_mpirun(const EnvironmentReader& environment) {
  const auto mpirun = environment("OMPI_MCA_orte_hnp_uri");
  const auto daemon = environment("OMPI_MCA_orte_local_daemon_uri");
  if (mpirun && daemon) {
    return MpirunHost{.names = addresses_of_uri(*mpirun), .said_by = *mpirun, .is_here = *mpirun == *daemon};
  }
  constexpr std::string_view kPrefix = "prterun-";
  const std::string job = environment("PMIX_NAMESPACE").value_or("");
  const std::string server = environment("PMIX_SERVER_URI2").value_or("");
  const size_t end = job.rfind('-');
  if (!job.starts_with(kPrefix) || end <= kPrefix.size() || server.empty()) return std::nullopt;
  return MpirunHost{.names = {job.substr(kPrefix.size(), end - kPrefix.size())},
                    .said_by = job,
                    .is_here = server.find("@0.0;") != std::string::npos};
}

// Nothing says where rank 0 runs, but where mpirun does. If rank 0 is not there, it ends with an error, and mpirun then
// ends the others.
void find_host_of_open_mpi(const EnvironmentReader& environment, StartedPlace& place) {
  constexpr const char* kSay = "Start with mpirun -x MASTER_ADDR=..., the address of the first host";
  const std::optional<MpirunHost> mpirun = find_mpirun(environment);
  if (!mpirun) {
    place.why_no_host = cat("neither OMPI_MCA_orte_hnp_uri nor PMIX_NAMESPACE tells where mpirun runs. ", kSay);
  } else if (place.rank == 0 && !mpirun->is_here) {
    place.why_no_host = cat("rank 0 runs on another host than mpirun, and only mpirun's address is known. ", kSay);
  } else if (mpirun->names.size() != 1) {
    place.why_no_host = cat("the host of mpirun does not have one address, but ", mpirun->names.size(), " (",
                            mpirun->said_by, "). ", kSay, ", or choose an interface with --mca oob_tcp_if_include");
  } else {
    place.host = mpirun->names.front();
  }
}

std::optional<StartedPlace> by_open_mpi(const EnvironmentReader& environment) {
  StartedPlace place{.starter = "Open MPI"};
  if (!has_rank_and_size(environment, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", place)) return std::nullopt;
  place.local_rank = integer_variable(environment, "OMPI_COMM_WORLD_LOCAL_RANK");
  place.local_world_size = integer_variable(environment, "OMPI_COMM_WORLD_LOCAL_SIZE");
  const auto job = environment("PMIX_NAMESPACE");
  place.port = job ? port_of(fnv1a(*job)) : kUsualPort;
  if (place.local_world_size == place.world_size) {
    place.host = kLoopback;
  } else {
    find_host_of_open_mpi(environment, place);
  }
  return place;
}

std::optional<StartedPlace> by_hydra(const EnvironmentReader& environment) {
  StartedPlace place{.starter = "the mpirun of MPICH or Intel MPI"};
  if (!has_rank_and_size(environment, "PMI_RANK", "PMI_SIZE", place)) return std::nullopt;
  place.local_rank = integer_variable(environment, "MPI_LOCALRANKID");
  place.local_world_size = integer_variable(environment, "MPI_LOCALNRANKS");
  const auto job = environment("I_MPI_HYDRA_UUID");  // of Intel MPI; MPICH's hydra does not name its job
  place.port = job ? port_of(fnv1a(*job)) : kUsualPort;
  if (place.local_world_size == place.world_size) place.host = kLoopback;
  place.why_no_host =
      "hydra does not tell where rank 0 runs. Start with mpirun -genv MASTER_ADDR ..., the address of "
      "the first host";
  return place;
}

// "batch5 1 a01 42 a02 42" -> a01, "a01 42 a02 42" -> a01: a first host of one slot is that of the job's script, where
// no rank runs, if there are others.
std::string first_lsf_host(const EnvironmentReader& environment) {
  auto words = classic_stream<std::istringstream>(environment("LSB_MCPU_HOSTS").value_or(""));
  std::string first, first_slots, second;
  words >> first >> first_slots >> second;
  return first_slots == "1" && !second.empty() ? second : first;
}

// LSF's jsrun.
std::optional<StartedPlace> by_lsf(const EnvironmentReader& environment) {
  if (!environment("LSB_JOBID")) return std::nullopt;
  StartedPlace place{.starter = "LSF's jsrun"};
  if (!has_rank_and_size(environment, "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", place)) return std::nullopt;
  place.local_rank = integer_variable(environment, "JSM_NAMESPACE_LOCAL_RANK");
  place.local_world_size = integer_variable(environment, "JSM_NAMESPACE_LOCAL_SIZE");
  place.port = port_of(digits(environment("LSB_JOBID")));
  place.host = place.local_world_size == place.world_size ? kLoopback : first_lsf_host(environment);
  place.why_no_host = "LSB_MCPU_HOSTS is missing. Set MASTER_ADDR to the host of rank 0";
  return place;
}

// Does the SLURM step only carry something that starts ranks itself: one task on each node?
bool carries_daemons(const EnvironmentReader& environment) {
  return environment("SLURM_STEP_NUM_TASKS") == environment("SLURM_STEP_NUM_NODES");
}

bool agree(const StartedPlace& one, const StartedPlace& other) {
  return one.rank == other.rank && one.world_size == other.world_size;
}

[[noreturn]] void refuse_contradiction(const StartedPlace& one, const StartedPlace& other) {
  throw ConfigError(cat("environment: ", one.starter, " says rank ", one.rank, " of ", one.world_size, " (",
                        one.rank_variables, "), but ", other.starter, " says rank ", other.rank, " of ",
                        other.world_size, " (", other.rank_variables,
                        "). Unset the variables that are not of this job, or set RANK and WORLD_SIZE"));
}

}  // namespace

std::optional<StartedPlace> started_place(const EnvironmentReader& environment) {
  const auto open_mpi = by_open_mpi(environment);
  const auto hydra = by_hydra(environment);
  const auto slurm = by_slurm(environment);
  auto lsf = by_lsf(environment);
  if (lsf) {  // whose jsrun sets the variables of Open MPI too, and says more
    for (const auto* other : {&open_mpi, &hydra}) {
      if (*other && !agree(*lsf, **other)) refuse_contradiction(*lsf, **other);
    }
    return lsf;
  }
  if (open_mpi && hydra && !agree(*open_mpi, *hydra)) refuse_contradiction(*open_mpi, *hydra);
  const auto& mpirun = open_mpi ? open_mpi : hydra;
  if (!mpirun || !slurm) return mpirun ? mpirun : slurm;
  if (!agree(*mpirun, *slurm)) {
    if (!carries_daemons(environment)) refuse_contradiction(*mpirun, *slurm);
    return mpirun;
  }
  return open_mpi ? open_mpi : slurm;  // srun --mpi=pmi2 sets PMI_RANK too, and SLURM says more
}

std::string first_slurm_host(const std::string& list, const std::string& where) {
  std::string host;
  for (size_t at = 0; at < list.size() && list[at] != ','; ++at) {
    if (list[at] != '[') {
      host += list[at];
      continue;
    }
    const size_t close = list.find(']', at);
    const size_t first_end = list.find_first_of(",-]", at);
    require<ConfigError>(close != std::string::npos && first_end > at + 1, where,
                         ": expected names such as node[01-04,07], found '", list, "'");
    host.append(list, at + 1, first_end - at - 1);
    at = close;
  }
  require<ConfigError>(!host.empty(), where, ": expected names such as node[01-04,07], found '", list, "'");
  return host;
}

int slurm_tasks_on_node(const std::string& list, int node, const std::string& where) {
  int nodes = 0;
  for (size_t begin = 0; begin < list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    const std::string item = list.substr(begin, end - begin);  // "2" or "2(x3)"
    const size_t mark = item.find("(x");
    const bool repeated = mark != std::string::npos && item.back() == ')';
    const int tasks = parse_integer(item.substr(0, mark), where);
    nodes += repeated ? parse_integer(item.substr(mark + 2, item.size() - mark - 3), where) : 1;
    if (node < nodes) return tasks;
    begin = end + 1;
  }
  throw ConfigError(
      cat(where, ": expected the tasks of at least ", node + 1, " nodes, as in 2(x3),1, found '", list, "'"));
}

}  // namespace ds::comm
