// What a rank tells the others when it comes to the meeting place. Torch-free.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/secret/job_secret.h"

namespace ds::comm {

// What every rank knows of another one after the rendezvous.
struct RankPlace {
  std::string host_name;
  int64_t process = 0;  // process id
  std::string domain;   // shared_memory_domain(): ranks with equal ones can share memory
  std::string address;  // from which it reaches the meeting place; empty where there is none
};

// "host7, pid 4711".
std::string text_of(const RankPlace& place);

// As JSON; with the job's secret, and a proof that who wrote it has it.
std::string arrival_text(const RankPlace& place, int rank, int world_size, const std::optional<JobSecret>& secret);

// Throws CommError that names the rank: what no rank writes, no proof where this rank has a secret, another number of
// ranks than this rank expects.
RankPlace read_arrival(const std::string& text, int rank, int world_size, const std::optional<JobSecret>& secret);

}  // namespace ds::comm
