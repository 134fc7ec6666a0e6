// ds-launch from options to exit code, in order.
#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "core/check.h"
#include "launcher/command_line/console.h"
#include "launcher/command_line/launch_lines.h"
#include "launcher/command_line/notices.h"
#include "launcher/command_line/options.h"
#include "launcher/command_line/pid_file.h"
#include "launcher/hosts/endpoint_meeting.h"
#include "launcher/hosts/host_choice.h"
#include "launcher/hosts/node.h"
#include "launcher/hosts/run_on_hosts.h"
#include "launcher/machine/rendezvous_port.h"
#include "launcher/other_launchers/tool_run.h"
#include "launcher/parity/parity_command.h"
#include "launcher/program/forwarded_environment.h"
#include "launcher/program/program_path.h"
#include "launcher/ranks/job.h"
#include "launcher/ranks/job_plan.h"
#include "launcher/ranks/restarts.h"

namespace ds::launcher {
namespace {

constexpr int kWrongSetting = 2;
constexpr double kLastWriteSeconds = 5;  // for a reader that is slow to take the report

// The place of this machine as one of many hosts that are started by hand.
NodePlace place_by_hand(const Options& options, const HostChoice& choice) {
  NodePlace place{.host = choice.hosts[static_cast<size_t>(choice.node)].name,
                  .node = choice.node,
                  .nodes = static_cast<int>(choice.hosts.size()),
                  .first_rank = count_slots({choice.hosts.begin(), choice.hosts.begin() + choice.node}),
                  .world_size = count_slots(choice.hosts),
                  .master_addr = options.master_addr.empty() ? "127.0.0.1" : options.master_addr,
                  .master_port = options.master_port.value_or(kDefaultMasterPort),
                  .flight_job = {}};
  if (choice.node > 0) return place;
  require_own_address(place.master_addr);
  choose_master_port(place.master_port);  // throws when it is in use: the others could not learn of another one
  return place;
}

// The place of this machine as one of several that start the same line; returns when all of them have.
NodePlace place_by_arrival(const Options& options, const std::vector<std::string>& environment, Notices& notices) {
  char own[256] = "";
  gethostname(own, sizeof(own) - 1);
  const int nodes = *options.num_nodes;
  notices.debug("waits for ", nodes, " nodes at ", options.master_addr, ':', *options.master_port);
  const GivenPlace given = meet_at_endpoint(
      {.host = options.master_addr, .port = *options.master_port, .limit_seconds = options.join_timeout_seconds},
      {.id = options.rendezvous_id, .nodes = nodes, .ranks = count_ranks_here(options, environment), .host = own},
      [&](const std::string& text) { notices.warning(text); });
  notices.info("node ", given.node, " of ", nodes, ", by arrival at ", options.master_addr, ':', *options.master_port,
               ": ranks from ", given.first_rank, " on, of ", given.world_size);
  return {.host = own,
          .node = given.node,
          .nodes = nodes,
          .first_rank = given.first_rank,
          .world_size = given.world_size,
          .master_addr = options.master_addr,
          .master_port = given.master_port,
          .flight_job = given.flight_job};
}

int run_job(Options options, const std::vector<std::string>& environment, Console& console) {
  Notices notices(console, options.verbosity);
  try {
    if (!options.from_environment.empty()) notices.info("from the environment: ", options.from_environment);
    settle_counts(options, !hosts_of(options).empty(), count_local_gpus(environment), count_local_cores());
    if (options.launcher != Launcher::kSsh) return run_with_tool(options, environment, notices);
    const bool chosen_by_slot = !options.include.empty() || !options.exclude.empty();
    const HostChoice choice = choose_where(options, chosen_by_slot ? count_local_slots(environment) : 0);
    const int host_count = choice.mode == HostChoice::Mode::kSsh ? static_cast<int>(choice.hosts.size()) : 1;
    require<ConfigError>(options.min_nodes.value_or(1) <= host_count, "--min_nodes ", options.min_nodes.value_or(1),
                         ": there ", host_count == 1 ? "is " : "are ", host_count, host_count == 1 ? " host" : " hosts",
                         "; name more in a --hostfile");
    if (choice.mode == HostChoice::Mode::kSsh) {
      return run_on_hosts(choice.hosts, options, environment, console, notices);
    }
    std::optional<std::vector<int>> slots = choice.slots;
    std::optional<NodePlace> place;
    if (choice.mode == HostChoice::Mode::kByHand) {
      slots = choice.hosts[static_cast<size_t>(choice.node)].slots;
      place = place_by_hand(options, choice);
    }
    const PidFile pid_file(options.save_pid ? pid_file_path() : "");
    for (Restarts restarts(options.max_restarts);;) {
      const std::vector<std::string> of_start = with_entries(environment, restarts.entries());
      if (choice.mode == HostChoice::Mode::kMeet) place = place_by_arrival(options, environment, notices);
      Job job(plan_job(options, of_start, slots, place, notices), console, notices);
      const int code = job.run();
      if (!job.failed_by_itself() || !restarts.after_failure(notices)) return code;
    }
  } catch (const ProgramError& error) {
    notices.error(error.what());
    return error.exit_code();
  } catch (const Error& error) {
    notices.error(error.what());
    return kWrongSetting;
  }
}

// `words` are argv[1...], `environment` the inherited one. Returns the exit code: that of the first failed rank, 128 +
// signal, 255 when a host was lost, 127 or 126 when the program was not found or cannot be run, 2 for a wrong command
// line or setting. Of the command parity: 0, 1 or 2 (launcher/parity/parity_command.h).
int launch(const std::vector<std::string>& words, const std::vector<std::string>& environment) {
  // A signal that the parent ignores stays ignored over exec, so each is set here. Ranks get the defaults back.
  signal(SIGCHLD, SIG_DFL);  // else the kernel keeps no status of a rank that has ended
  signal(SIGPIPE, SIG_IGN);  // a reader that is gone must not end the training
  signal(SIGXFSZ, SIG_IGN);  // nor must a log that has come to a limit (ulimit -f)
  if (words == std::vector<std::string>{std::string(kNodeFlag)}) return serve_node(environment);
  Console console(STDOUT_FILENO, STDERR_FILENO);
  int result = 0;
  try {
    const auto run = [&](const Options& options, const std::vector<std::string>& of_ranks) {
      return run_job(options, of_ranks, console);
    };
    if (!words.empty() && words.front() == kParityWord) {
      result = run_parity({words.begin() + 1, words.end()}, environment, console, run);
    } else if (const Options options = parse_options(words, environment); options.answer) {
      console.raw(Console::kOut, *options.answer);
    } else {
      result = run(options, environment);
    }
  } catch (const Error& error) {
    Notices(console, Verbosity::kError).error(error.what());
    result = kWrongSetting;
  }
  console.finish(kLastWriteSeconds);
  return result;
}

// Streams that ds-launch was started without would be taken by the next files it opens.
void open_missing_streams() {
  for (int fd = 0; fd < 3; ++fd) {
    if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd) _exit(2);
  }
}

}  // namespace
}  // namespace ds::launcher

int main(int argc, char** argv) {
  ds::launcher::open_missing_streams();
  try {
    std::vector<std::string> environment;
    for (char** entry = environ; *entry != nullptr; ++entry) environment.emplace_back(*entry);
    return ds::launcher::launch({argv + 1, argv + argc}, environment);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ds-launch: %s\n", error.what());
    return 2;
  }
}
