// The message of a rank that comes to the meeting place. Torch-free.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/secret/job_secret.h"

namespace ds::comm {

// The place of a rank, as every other rank knows it after the rendezvous.
struct RankPlace {
  std::string host_name;
  int64_t process = 0;  // process id
  std::string domain;   // shared_memory_domain(): ranks with equal ones can share memory
  std::string address;  // its address towards the meeting place; empty where there is none
};

// Returns "host7, pid 4711".
std::string text_of(const RankPlace& place);

// Writes the message as JSON; with a secret, it holds a proof that its writer has the job's secret.
std::string arrival_text(const RankPlace& place, int rank, int world_size, const std::optional<JobSecret>& secret);

// Reads the message. Throws CommError that names the rank: what no rank writes, no proof where this rank has a secret,
// another number of ranks than this rank expects.
RankPlace read_arrival(const std::string& text, int rank, int world_size, const std::optional<JobSecret>& secret);

}  // namespace ds::comm
