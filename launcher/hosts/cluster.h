// The first ds-launch of a job on many hosts, from one start to the end of its ranks: one ssh for each host, from the
// check to the exit code. One thread, one poll loop.
//
// Note [Who failed first, among hosts]
// When a rank dies, ranks of other hosts soon fail too, and their reports may arrive before its own. So each host says
// by its own steady clock when its first rank failed, and the difference of the clocks is known to half a round trip.
//
// Note [Ranks that die slowly]
// A rank with much memory may take longer to die from SIGKILL than a host that hangs is given to answer. To start the
// ranks again beside the old ones would fail for lack of memory or devices, so each host is asked whether it is still
// there (kClock), and one that is gets more time.
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
  std::vector<Host> asked, away;  // hosts to start on, if they are ready; hosts known not to be, asked again meanwhile
  size_t least = 1;               // the fewest hosts to start with
  bool first_start = true;        // at the first start all have to be ready, unless the job is elastic
  Verbosity trouble_level = Verbosity::kError;  // level of the notices about hosts that are not ready
};

class Cluster {
 public:
  enum class Outcome {
    kEnded,          // the job ended well, or by a signal to ds-launch
    kNotReady,       // nothing was started
    kRankFailed,     // a rank failed on a host that is still there
    kHostLost,       // at least one host was lost
    kHostsReturned,  // the program has ended, after a checkpoint, for hosts to be taken in
  };

  // References that stay the same for all starts of a job.
  struct JobDeps {
    const OwnProgram& own;
    AskIntervals& intervals;
  };
  // `environment`: the inherited one. Blocks the signals that it handles; starts nothing yet. All references outlive
  // it.
  Cluster(StartHosts hosts, const Options& options, std::vector<std::string> environment, JobDeps job, Console& console,
          Notices& notices);

  // Returns the exit code of ds-launch: that of the rank that failed first on any host, 255 for a host that was lost,
  // 2 when hosts are not ready (127 or 126: for lack of the program), 128 + signal. Throws ConfigError, UsageError or
  // ProgramError when not even ssh can be started.
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
  bool restart_asked_ = false, restart_begun_ = false;  // for hosts that have come back; by the program
  Deadline deadline_;                                   // when to end what is left by stronger means
  Deadline next_alive_;                                 // when to send the next kAlive
};

}  // namespace ds::launcher
