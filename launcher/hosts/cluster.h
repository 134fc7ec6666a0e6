// One start of a job on many hosts, as the first ds-launch runs it. It opens one ssh connection to each host, asks each
// whether it can start the program (the check), orders the ranks to start, and waits until all have ended. If a rank
// fails or a connection is lost, it tells the other hosts to end their ranks, and kills those that do not end in time.
// For an elastic job it also asks missing hosts now and then; when one is ready, it has the program end after its next
// checkpoint, so that the next start takes the host in. One thread, one poll loop.
//
// Note [Who failed first, among hosts]
// When a rank dies, ranks of other hosts soon fail too, and their reports may arrive before its own. So each host says
// by its own steady clock when its first rank failed, and the first ds-launch estimates how far each host's clock
// differs from its own, to half of a message's round trip.
//
// Note [Ranks that die slowly]
// After SIGKILL a rank with much memory may take longer to die than the time after which a host that does not answer is
// given up. New ranks started beside the old ones would lack memory or devices. So after a kill each host is asked for
// its clock (kClock); one that answers is given more time.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/unique_fd.h"
#include "launcher/command_line/console.h"
#include "launcher/command_line/host_list.h"
#include "launcher/command_line/notices.h"
#include "launcher/command_line/options.h"
#include "launcher/hosts/away_hosts.h"
#include "launcher/hosts/host_link.h"
#include "launcher/processes/deadline.h"
#include "launcher/processes/signal_policy.h"
#include "launcher/program/own_program.h"
#include "launcher/protocol/message.h"

namespace ds::launcher {

// The hosts of one start.
struct StartHosts {
  std::vector<Host> asked;  // hosts to start on, if they are ready
  std::vector<Host> away;   // hosts known not to be ready, asked again while the job runs
  size_t least = 1;         // the fewest hosts to start with
  bool first_start = true;  // at the first start all have to be ready, unless the job is elastic (--min_nodes)
  Verbosity trouble_level = Verbosity::kError;  // level of the notices about hosts that are not ready
};

// The hosts of one start, their connections and what is asked of them.
class Cluster {
 public:
  enum class Outcome {
    kEnded,          // the job ended well, or by a signal to ds-launch
    kNotReady,       // nothing was started
    kRankFailed,     // a rank failed on a host that is still there
    kHostLost,       // at least one host was lost
    kHostsReturned,  // hosts are back: the program has ended after a checkpoint, to be started with them
  };

  // References that stay the same for all starts of a job.
  struct JobDeps {
    const OwnProgram& own;
    AskIntervals& intervals;
  };
  // `environment`: the inherited one. Blocks the signals that it handles; starts nothing yet. `console`, `notices` and
  // what JobDeps refers to outlive it; `options` is copied.
  Cluster(StartHosts hosts, const Options& options, std::vector<std::string> environment, JobDeps job, Console& console,
          Notices& notices);

  // Returns the exit code of ds-launch: 0 when all ended well, that of the rank that failed first on any host, 255 for
  // a host that was lost, 2 when hosts are not ready (127 or 126: for lack of the program), 128 + signal, or
  // kRestartExitCode where the program has ended for hosts to be taken in. Throws UsageError or ProgramError when ssh
  // cannot be started, ConfigError for a bad line of .deepspeed_env or bad --launcher_args, IoError when DS_ENV_FILE
  // names no file.
  int run();

  // How the start ended. To be called after run().
  Outcome outcome() const;
  std::set<std::string> away() const;  // hosts that were not ready or are lost, and have not come back

 private:
  bool ready_to_start();
  void wait_for_something(const Deadline& limit);
  void handle_signal(int number);
  void begin_to_end(int number);
  void keep_alive();
  void read_from(HostMember& member);
  void take(HostMember& member, const Message& message);
  void on_over(HostMember& member);
  void on_failure(HostMember& failed);
  void enforce_deadline();
  void kill_ranks(const std::string& why);
  void close_links();
  bool lacks_hosts() const;
  void look_for_returned_hosts();
  bool ended_for_restart(HostMember& member, int code);
  int report() const;

  Options options_;
  std::vector<std::string> environment_;
  const OwnProgram& own_;
  AskIntervals& intervals_;
  Console& console_;
  Notices& notices_;
  bool hangup_ignored_ = false;
  UniqueFd signals_;
  StartHosts hosts_;
  HostMembers members_;
  AwayHosts away_;
  bool started_ = false;
  bool failed_ = false;
  SignalPolicy signal_policy_;
  int ending_signal_ = 0;  // the signal that caused the end; 0: none, also when one came after a failure
  std::optional<Deadline::Time> kill_sent_;
  bool restart_asked_ = false;  // the program was asked to end, so that hosts that have come back can be taken in
  bool restart_begun_ = false;  // the program has begun to end for that
  Deadline deadline_;           // when to end what is left by stronger means
  Deadline next_alive_;         // when to tell the hosts next that this ds-launch still runs (kAlive)
};

}  // namespace ds::launcher
