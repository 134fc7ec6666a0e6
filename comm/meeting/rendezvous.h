// How the ranks of a job find each other.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/meeting/arrival.h"

namespace ds::comm {

// The ranks of a job that have met.
struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store;  // null in a world of one
  bool has_secret = false;  // then `store` is a PrefixStore, and what lies outside of its prefix is not of this job
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;        // position among the ranks of this host
  int local_world_size = 1;  // ranks on this host
  std::vector<RankPlace> ranks;
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};

  // Returns the ranks grouped by host, hosts in the order of their lowest rank, ranks ascending.
  std::vector<std::vector<int>> hosts() const;
  // Returns "host7, pid 4711" for each rank.
  std::vector<std::string> descriptions() const;
};

struct RendezvousOptions {
  std::string init_method = "env://";  // see rendezvous_address.h
  // Time limit of the rendezvous, and of every wait of what is made from it.
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};
};

// Lets the ranks meet; returns once all of them have come. A world of one returns at once, without a socket. Throws
//   ConfigError  the address or the environment is wrong (the variable or part is named);
//   CommError    rank 0 cannot listen (port in use), the host is unknown or does not answer, ranks are missing at the
//                time limit (they are listed, with the hosts of those that came), a rank was claimed twice (both are
//                named), the ranks disagree on the world size, rank 0 and this rank have different secrets
//                (core/secret/job_secret.h) or one of them none, or what stands at a rank's place does not prove that
//                it is of this job.
Rendezvous rendezvous(const RendezvousOptions& options = {});

// Lets the ranks meet over a store that the caller made and every rank shares (tests, embedding).
Rendezvous rendezvous(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                      std::chrono::milliseconds timeout);

}  // namespace ds::comm
