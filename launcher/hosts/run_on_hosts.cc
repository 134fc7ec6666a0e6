#include "launcher/hosts/run_on_hosts.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>

#include "core/flight_job.h"
#include "core/secret/job_secret.h"
#include "launcher/hosts/ask_intervals.h"
#include "launcher/hosts/cluster.h"
#include "launcher/processes/deadline.h"
#include "launcher/processes/orphan_guard.h"
#include "launcher/program/forwarded_environment.h"
#include "launcher/program/own_program.h"
#include "launcher/ranks/restarts.h"

namespace ds::launcher {
namespace {

constexpr std::chrono::seconds kBetweenStarts(1);

// The hosts whose names are, or are not, among `names`.
std::vector<Host> with_names(const std::vector<Host>& hosts, const std::set<std::string>& names, bool among) {
  std::vector<Host> found;
  for (const Host& host : hosts) {
    if (names.contains(host.name) == among) found.push_back(host);
  }
  return found;
}

}  // namespace

int run_on_hosts(const std::vector<Host>& hosts, const Options& options, const std::vector<std::string>& environment,
                 Console& console, Notices& notices) {
  const size_t least = options.min_nodes ? static_cast<size_t>(*options.min_nodes) : hosts.size();
  const OwnProgram own = find_own_program();
  AskIntervals intervals;
  Restarts restarts(options.max_restarts);
  std::set<std::string> away;
  Deadline join_limit;
  Verbosity trouble_level = Verbosity::kError;
  for (;;) {
    std::vector<std::string> entries = restarts.entries();
    // The hosts are to agree on them. Both travel over ssh's standard input.
    entries.push_back(cat(kFlightJobVariable, '=', new_launch_id()));
    entries.push_back(cat(kJobSecretVariable, '=', new_job_secret()));
    Options of_start = options;
    if (away.contains(hosts.front().name)) of_start.master_addr.clear();  // that is no address of another host
    Cluster cluster({.asked = with_names(hosts, away, false),
                     .away = with_names(hosts, away, true),
                     .least = least,
                     .first_start = restarts.starts() == 0,
                     .trouble_level = trouble_level},
                    of_start, with_entries(environment, entries), {.own = own, .intervals = intervals}, console,
                    notices);
    const int code = cluster.run();
    away = cluster.away();
    const bool enough = hosts.size() - away.size() >= least;
    switch (cluster.outcome()) {
      case Cluster::Outcome::kEnded:
        return code;
      case Cluster::Outcome::kNotReady:
        if (restarts.starts() == 0) return code;
        if (join_limit.passed()) {
          notices.error("fewer than ", least, least == 1 ? " host was" : " hosts were", " ready within ",
                        options.join_timeout_seconds, " s (--join_timeout)");
          return code;
        }
        away.clear();
        trouble_level = Verbosity::kDebug;            // it has been said
        std::this_thread::sleep_for(kBetweenStarts);  // signals wait for the next start, which takes them first
        continue;
      case Cluster::Outcome::kHostsReturned:
        restarts.with_other_hosts();
        notices.warning("starting all ranks again, to take in hosts");
        break;
      case Cluster::Outcome::kHostLost:
        if (options.min_nodes && enough) {
          restarts.with_other_hosts();
          notices.warning("starting all ranks again, without the hosts that are lost");
          break;
        }
        [[fallthrough]];
      case Cluster::Outcome::kRankFailed:
        if (!restarts.after_failure(notices)) return code;
        break;
    }
    if (!enough || !options.min_nodes) away.clear();
    join_limit = Deadline::in(options.join_timeout_seconds);
    trouble_level = Verbosity::kWarning;
  }
}

}  // namespace ds::launcher
