// The hosts of a job before their ranks run: connecting, asking whether they are ready, and the order to start.
#pragma once

#include <string>
#include <vector>

#include "launcher/command_line/notices.h"
#include "launcher/command_line/options.h"
#include "launcher/hosts/host_checks.h"
#include "launcher/hosts/host_link.h"
#include "launcher/program/own_program.h"

namespace ds::launcher {

// The question that host `index` is asked.
CheckRequest request_for_host(const HostMembers& members, size_t index, const Options& options,
                              const std::vector<std::string>& environment);

// Starts an ssh for each host and sends the question. Throws ProgramError or UsageError when ssh cannot be started.
void ask_hosts(HostMembers& members, const Options& options, const std::vector<std::string>& environment,
               const OwnProgram& own, Notices& notices);

// Names the hosts that have not answered yet, while the others are waited for.
void report_unanswered(const HostMembers& members, const Options& options, Notices& notices);

// The answer of each host; for hosts that have not answered, why not.
std::vector<HostAnswer> answers_of(const HostMembers& members, const Options& options);

// Says what keeps the hosts from starting, also that they have not answered. Returns false, and says nothing, when all
// are ready.
bool report_trouble(const HostMembers& members, const Options& options, const OwnProgram& own, Notices& notices);

// The exit code of ds-launch after report_trouble().
int exit_code_of_trouble(const HostMembers& members);

// Sends the order to start; all hosts have answered and are ready.
void order_start(HostMembers& members, const Options& options, Notices& notices);

// The hosts that were asked and cannot be used, and whether the others are enough.
struct Selection {
  bool enough = false;  // at least `least` hosts are ready
  std::vector<Host> unready;
};

// Leaves the first options.max_nodes hosts that are ready in `members`, and lets the others go. Says, at `level`, why
// hosts are not ready, and whether too few are; then `members` stay as they are.
Selection select_hosts(HostMembers& members, size_t least, const Options& options, const OwnProgram& own,
                       Verbosity level, Notices& notices);

}  // namespace ds::launcher
