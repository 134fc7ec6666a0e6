// This rank and the meeting place, as an init_method and the environment give them. Torch-free.
#pragma once

#include <optional>
#include <string>

#include "comm/meeting/environment_reader.h"

namespace ds::comm {

enum class MeetingPlace {
  kAlone,  // a world of one rank: no store, no socket
  kTcp,    // rank 0 listens on host:port
  kFile,   // a file that all ranks can reach
};

struct RendezvousAddress {
  MeetingPlace place = MeetingPlace::kAlone;
  int rank = 0;
  int world_size = 1;
  std::optional<int> local_rank;        // the launcher's number; checked against what the ranks find out
  std::optional<int> local_world_size;  // the launcher's number; checked too
  std::string host;                     // kTcp
  int port = 0;                         // kTcp
  std::string path;                     // kFile
  bool rank_zero_listens = true;        // kTcp; else the launcher does (torchrun's agent) and rank 0 connects too
  std::string prefix;  // kTcp: the prefix of all keys in the store, so that they are not the launcher's; may be empty
};

// `init_method`:
//   env://                                     RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
//                                              MASTER_PORT, as ds-launch and torchrun set them. What is not set comes
//                                              from srun or mpirun (started_place.h). None of them: a world of one.
//   tcp://host:port[?rank=R&world_size=W]      what is not in the query comes from RANK and WORLD_SIZE,
//                                              or from srun or mpirun
//   file:///path[?rank=R&world_size=W]         likewise; the file must not exist before the first rank
// Throws ConfigError naming the variable or the part of the address, what was expected and what was found.
RendezvousAddress parse_rendezvous(const std::string& init_method, const EnvironmentReader& environment);

}  // namespace ds::comm
