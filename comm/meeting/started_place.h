// The place of a process among those that SLURM's srun, LSF's jsrun or the mpirun of an MPI started, from the variables
// that these set. Torch-free. The program itself needs no MPI.
//
//            rank, world size                        place on the host                       several hosts meet at
//   srun     SLURM_PROCID, SLURM_STEP_NUM_TASKS      SLURM_LOCALID,                          first of
//                                                    SLURM_STEP_TASKS_PER_NODE               SLURM_STEP_NODELIST
//   Open MPI OMPI_COMM_WORLD_RANK, _SIZE             OMPI_COMM_WORLD_LOCAL_RANK, _LOCAL_SIZE  mpirun's host
//   hydra    PMI_RANK, PMI_SIZE                      MPI_LOCALRANKID, MPI_LOCALNRANKS         (MASTER_ADDR is needed)
//   jsrun    JSM_NAMESPACE_RANK, _SIZE               JSM_NAMESPACE_LOCAL_RANK, _LOCAL_SIZE    LSB_MCPU_HOSTS
//
// hydra is the mpirun of MPICH and of Intel MPI. Only a step of SLURM counts: the shell of salloc and the script of
// sbatch have SLURM_PROCID too, and are one process.
#pragma once

#include <optional>
#include <string>

#include "comm/meeting/environment_reader.h"

namespace ds::comm {

// The place of a process as its starter gives it.
struct StartedPlace {
  std::string starter;         // its name for messages: "Open MPI"
  std::string rank_variables;  // their names for messages: "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE"
  int rank = 0;
  int world_size = 1;
  std::optional<int> local_rank;
  std::optional<int> local_world_size;
  std::string host;         // where rank 0 can be reached; empty: nothing says so
  std::string why_no_host;  // why `host` is empty, and what to do
  int port = 0;             // where it listens, the same for all ranks of a job and seldom for another job
};

// Finds the place of this process; absent where none of them started it. An mpirun inside a SLURM job counts, not the
// step that carries its daemons. Throws ConfigError naming a variable that is missing or wrong, and two starters that
// contradict each other.
std::optional<StartedPlace> started_place(const EnvironmentReader& environment);

// Returns the first host of a list of SLURM: "node[01-04,07],gpu-[1-2]" -> "node01". Throws ConfigError that begins
// with `where` for an empty list or a bracket that is not closed.
std::string first_slurm_host(const std::string& list, const std::string& where);

// Returns how many tasks node number `node` (from 0) has: "2(x3),1" means 2, 2, 2, 1. Throws ConfigError that begins
// with `where` for another form and for a node that is not in the list.
int slurm_tasks_on_node(const std::string& list, int node, const std::string& where);

}  // namespace ds::comm
