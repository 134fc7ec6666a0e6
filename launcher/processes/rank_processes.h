// The processes of the ranks of one job on this machine: starts them, notices their ends, and signals them.
//
// Note [Who failed first]
// When a rank dies, the others soon fail too, because their peer is gone. Several deaths may wait when the caller wakes
// up, and waitpid() gives them in no useful order. So each rank has a pidfd in an epoll set, which hands events out in
// the order in which they happened.
#pragma once

#include <sys/resource.h>
#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "core/unique_fd.h"
#include "launcher/processes/orphan_guard.h"
#include "launcher/processes/rank_process.h"

namespace ds::launcher {

// The end of the process of a rank.
struct RankExit {
  int rank = 0;
  pid_t pid = 0;
  int status = 0;  // as wait4() gives it
  long peak_rss_kib = 0;
};

// Ranks are counted from 0 here. One thread uses it.
class RankProcesses {
 public:
  using OnExit = std::function<void(const RankExit& exit)>;

  // Starts the orphan guard, and no rank yet. To be called before other descriptors are open.
  RankProcesses(const std::string& launch_id, size_t ranks);

  // Starts a rank and returns its pid. Throws what start_rank() does, and UsageError where its end cannot be waited
  // for.
  pid_t start(int rank, const RankCommand& command);

  // The descriptor that is readable when take_exits() has something to do.
  int exits_fd() const { return exits_.get(); }
  // Calls `on_exit` for each rank that has ended, in the order of their ends. Ranks whose end has not been taken yet
  // count as running meanwhile.
  void take_exits(const OnExit& on_exit);
  // Takes the exits and reaps all other children that have ended (processes that ranks left behind), so that no zombies
  // pile up.
  void reap_all(const OnExit& on_exit);

  bool any_running() const { return running_ > 0; }
  // The numbers of the ranks that run, where the first of all ranks is `first_rank`.
  std::vector<int> running_ranks(int first_rank) const;
  // Whether no rank has ended with a status other than 0.
  bool all_ended_well() const;

  // Sends a signal to the process group of a rank that runs; does nothing when it has ended.
  void signal_rank(int rank, int number) const;
  // Sends a signal to the process groups of all ranks that run.
  void signal_all(int number) const;
  // Asks all ranks that run to end by SIGTERM.
  void ask_to_end() const;
  // Ends what the ranks have left behind, see OrphanGuard::sweep().
  std::vector<std::string> sweep(double grace_seconds);

 private:
  struct Rank {
    pid_t pid = 0;
    UniqueFd pidfd;
    bool running = false;
    int status = 0;
  };

  void record_exit(size_t index, int status, const rusage& usage, const OnExit& on_exit);

  OrphanGuard guard_;  // first: it wants no other descriptors
  UniqueFd exits_;
  std::vector<Rank> ranks_;
  int running_ = 0;
};

}  // namespace ds::launcher
