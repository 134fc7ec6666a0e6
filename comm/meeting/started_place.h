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

struct StartedPlace {
  std::string starter;         // for messages: "Open MPI"
  std::string rank_variables;  // for messages: "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE"
  int rank = 0;
  int world_size = 1;
  std::optional<int> local_rank;
  std::optional<int> local_world_size;
  std::string host;         // where rank 0 can be reached; empty: nothing says so
  std::string why_no_host;  // and what to do
  int port = 0;             // where it listens, the same for all ranks of a job and seldom for another job
};

// Absent where none of them started this process. An mpirun inside a SLURM job counts, not the step that carries its
// daemons. Throws ConfigError naming a variable that is missing or wrong, and two starters that contradict each other.
std::optional<StartedPlace> started_place(const EnvironmentReader& environment);

}  // namespace ds::comm
