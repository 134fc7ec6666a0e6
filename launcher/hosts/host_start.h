// The hosts of a job before their ranks run: connecting, asking whether they are ready, and the order to start.
#pragma once

#include <string>
#include <vector>

#include "launcher/command_line/notices.h"
#include "launcher/command_line/options.h"
#include "launcher/hosts/host_checks.h"
#include "launcher/hosts/host_member.h"
#include "launcher/program/own_program.h"

namespace ds::launcher {

// What host `index` is asked.
CheckRequest request_for_host(const HostMembers& members, size_t index, const Options& options,
                              const std::vector<std::string>& environment);

// Starts an ssh for each host and sends the question. Throws ProgramError or UsageError when ssh cannot be started.
void ask_hosts(HostMembers& members, const Options& options, const std::vector<std::string>& environment,
               const OwnProgram& own, Notices& notices);

// Names the hosts that have not answered yet, while the others are waited for.
void report_unanswered(const HostMembers& members, const Options& options, Notices& notices);

// What each host has answered; for those that have not, why.
std::vector<HostAnswer> answers_of(const HostMembers& members, const Options& options);

// Says what keeps the hosts from starting, those that have not answered included; nothing and false when all are ready.
bool report_trouble(const HostMembers& members, const Options& options, const OwnProgram& own, Notices& notices);

// The exit code of ds-launch after report_trouble().
int exit_code_of_trouble(const HostMembers& members);

// Sends the order to start; all hosts have answered and are ready.
void order_start(HostMembers& members, const Options& options, Notices& notices);

}  // namespace ds::launcher
