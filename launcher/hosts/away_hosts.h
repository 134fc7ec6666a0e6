// Hosts that a running elastic job is without: each is asked now and then whether it is ready again.
#pragma once

#include <poll.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "launcher/command_line/notices.h"
#include "launcher/command_line/options.h"
#include "launcher/hosts/ask_intervals.h"
#include "launcher/hosts/host_link.h"
#include "launcher/program/own_program.h"

namespace ds::launcher {

class AwayHosts {
 public:
  using Clock = std::chrono::steady_clock;

  // All but `options` outlive this.
  AwayHosts(const Options& options, const std::vector<std::string>& environment, const OwnProgram& own,
            AskIntervals& intervals, Notices& notices);

  void add(const Host& host);

  void append_waits(std::vector<pollfd>& waits) const;
  std::optional<Clock::time_point> next_time() const;  // when to call look()
  // Takes what has come and asks again where it is time. A host is ready when it would start `program` (file_hash()).
  // Returns the names of hosts that have become ready.
  std::vector<std::string> look(const std::string& program);

  std::vector<std::string> still_away() const;

 private:
  struct Asked {
    HostMembers host;        // the one host, or none while it is not asked
    std::string said;        // why it is not ready, though it answers
    Clock::time_point next;  // when to ask, or to give up
  };

  void ask(Asked& asked);
  void ask_later(Asked& asked) const;
  void take_answer(Asked& asked);
  std::string trouble_of(const CheckReply& reply, const std::string& program) const;

  Options options_;
  const std::vector<std::string>& environment_;
  const OwnProgram& own_;
  AskIntervals& intervals_;
  Notices& notices_;
  std::vector<Asked> asked_;
};

}  // namespace ds::launcher
