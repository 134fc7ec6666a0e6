// What an init_method and the environment say about this rank and the meeting place. Torch-free.
#pragma once

#include <functional>
#include <optional>
#include <string>

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
  std::optional<int> local_rank;        // as the launcher said it; checked against what the ranks find out
  std::optional<int> local_world_size;  // likewise
  std::string host;                     // kTcp
  int port = 0;                         // kTcp
  std::string path;                     // kFile
};

// How a variable reads: nullopt where it is not set or empty.
using EnvironmentReader = std::function<std::optional<std::string>(const char* name)>;
std::optional<std::string> process_environment(const char* name);

// `init_method`:
//   env://                                     RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
//   MASTER_PORT.
//                                              None of RANK, WORLD_SIZE, LOCAL_RANK set: a world of one.
//   tcp://host:port[?rank=R&world_size=W]      what is not in the query comes from RANK and WORLD_SIZE
//   file:///path[?rank=R&world_size=W]         likewise; the file must not exist before the first rank
// Throws ConfigError naming the variable or the part of the address, what was expected and what was found.
RendezvousAddress parse_rendezvous(const std::string& init_method, const EnvironmentReader& environment);

}  // namespace ds::comm
