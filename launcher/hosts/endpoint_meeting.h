// Gives node ranks to several ds-launch, each started by hand with the same line, at one address: torchrun's
// --rdzv_endpoint with --rdzv_backend=c10d.
//
// The ds-launch on the machine of the endpoint listens there (at a name: on all interfaces) and is node 0; where
// several run on that machine, the first. The others connect, say what they bring, and get node ranks in the order in
// which they came. What does not fit is told to both sides: another job (--rdzv_id) is sent away, another number of
// nodes
// (--nnodes) ends the meeting for all.
#pragma once

#include <functional>
#include <string>

namespace ds::launcher {

// The facts that a node brings to the meeting.
struct Arrival {
  std::string id;    // the job: --rdzv_id
  int nodes = 1;     // the number of nodes it expects
  int ranks = 1;     // the number of ranks it will run
  std::string host;  // for messages
};

// The place that a node gets in the job.
struct GivenPlace {
  int node = 0;
  int first_rank = 0;
  int world_size = 1;
  int master_port = 0;     // on the endpoint's machine, for rank 0
  std::string flight_job;  // the same on all nodes
};

struct Endpoint {
  std::string host;
  int port = 0;
  double limit_seconds = 600;  // the longest wait until all nodes have come
};

// Waits until all nodes have come and returns the place of this one; the world is the same on each. Throws ConfigError
// where nodes do not agree, CommError where they do not come in time (naming those that have), also for a name that is
// not known until then, or a port where this machine may not listen: `warn` is told such a reason when it is first met.
GivenPlace meet_at_endpoint(const Endpoint& endpoint, const Arrival& arrival,
                            const std::function<void(const std::string&)>& warn);

}  // namespace ds::launcher
