// The first ds-launch of a job on many hosts: one ssh for each host, from the check to the exit code. One thread, one
// poll loop.
//
// Note [Who failed first, among hosts]
// When a rank dies, ranks of other hosts soon fail too, and their reports may arrive before its own. So each host says
// by its own steady clock when its first rank failed, and the difference of the clocks is known to half a round trip.
#pragma once

#include <chrono>
#include <csignal>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launcher/clock_difference.h"
#include "launcher/console.h"
#include "launcher/host_checks.h"
#include "launcher/host_link.h"
#include "launcher/host_list.h"
#include "launcher/node_protocol.h"
#include "launcher/notices.h"
#include "launcher/options.h"

namespace ds::launcher {

class Cluster {
 public:
  // `environment`: the inherited one. Blocks the signals that it handles; starts nothing yet.
  Cluster(std::vector<Host> hosts, const Options& options, std::vector<std::string> environment, Console& console,
          Notices& notices);

  // Returns the exit code of ds-launch: that of the rank that failed first on any host, 255 for a host that was lost,
  // 2 when hosts are not ready (127 or 126: for lack of the program), 128 + signal. Throws ConfigError, UsageError or
  // ProgramError when not even ssh can be started.
  int run();

 private:
  using Clock = std::chrono::steady_clock;

  struct Member {
    Host host;
    std::unique_ptr<HostLink> link;
    std::optional<CheckReply> reply;
    std::string trouble;  // why there is no reply
    ClockDifference clock;
    std::optional<FailureMessage> failure;
    std::optional<int> exit_code;
    bool over = false;
  };

  void start_links();
  CheckRequest request_for(size_t index) const;
  bool all_answered() const;
  bool all_over() const;
  bool report_trouble() const;
  void start_ranks();
  void wait_for_something(const std::optional<Clock::time_point>& limit);
  void handle_signals();
  void handle_signal(int number);
  void stop_and_continue();
  void keep_alive();
  void read_from(Member& member);
  void take(Member& member, const Message& message);
  void on_over(Member& member);
  std::string why_over(const Member& member) const;
  void on_failure(Member& failed);
  void enforce_deadline();
  void send_all(const Message& message);
  void forget_all();
  std::string names(bool (*which)(const Member&)) const;
  const Member* first_failure() const;
  int report() const;

  Options options_;
  std::vector<std::string> environment_;
  Console& console_;
  Notices& notices_;
  bool hangup_ignored_ = false;
  UniqueFd signals_;
  std::vector<Member> members_;
  bool started_ = false;
  bool failed_ = false;
  int ending_signal_ = 0;
  bool interrupted_once_ = false;
  bool kill_sent_ = false;
  std::optional<Clock::time_point> deadline_;  // to end what is left by stronger means
  Clock::time_point next_alive_;
};

}  // namespace ds::launcher
