#include "launcher/hosts/host_start.h"

#include <algorithm>
#include <filesystem>

#include "core/check.h"
#include "launcher/command_line/pid_file.h"
#include "launcher/command_line/shell_words.h"
#include "launcher/hosts/host_checks.h"
#include "launcher/hosts/node.h"
#include "launcher/hosts/ssh_command.h"
#include "launcher/program/forwarded_environment.h"
#include "launcher/program/forwarded_options.h"
#include "launcher/program/program_path.h"
#include "launcher/program/rank_environment.h"
#include "launcher/protocol/node_link.h"

namespace ds::launcher {
namespace {

std::vector<std::string> words_for_host(const Options& options) {
  std::vector<std::string> words = {"--standalone"};
  for (std::string& word : words_for_ranks(options)) words.push_back(std::move(word));
  return words;
}

std::string find_ssh(const std::vector<std::string>& environment) {
  try {
    return find_program("ssh", search_path(environment));
  } catch (const ProgramError&) {
    throw UsageError("many hosts need the program ssh, which is not in PATH: install it (Debian: openssh-client)");
  }
}

}  // namespace

CheckRequest request_for_host(const HostMembers& members, size_t index, const Options& options,
                              const std::vector<std::string>& environment) {
  const HostMember& member = members[index];
  const std::filesystem::path here = std::filesystem::current_path();
  const std::string home = environment_value(environment, "HOME").value_or("/");
  return {.folder = here.string(),
          .host = member.host.name,
          .first = index == 0 || options.min_nodes,  // of an elastic job any host may become the first
          .slots = member.host.slots,
          .master_addr = index == 0 ? options.master_addr : "",
          .link_timeout = options.link_timeout_seconds,
          .pid_file = options.save_pid ? pid_file_path() : "",
          .words = words_for_host(options),
          .environment = forwarded_environment(environment, home, here)};
}

void ask_hosts(HostMembers& members, const Options& options, const std::vector<std::string>& environment,
               const OwnProgram& own, Notices& notices) {
  const std::string ssh = find_ssh(environment);
  const std::string command = cat("exec ", shell_word(own.path), ' ', kNodeFlag);
  const SshSettings settings{.port = options.ssh_port,
                             .more_words = options.launcher_args,
                             .connect_timeout = options.connect_timeout_seconds,
                             .link_timeout = options.link_timeout_seconds};
  for (size_t i = 0; i < members.size(); ++i) {
    HostMember& member = members[i];
    const CheckRequest request = request_for_host(members, i, options, environment);
    member.link = std::make_unique<HostLink>(ssh, ssh_command(settings, member.host.name, command), environment);
    notices.debug("host ", member.host.name, ": ssh runs as pid ", member.link->pid());
    member.link->send(to_message(request));
  }
}

void report_unanswered(const HostMembers& members, const Options& options, Notices& notices) {
  std::string unreached, reading;
  for (const HostMember& member : members) {
    if (member.reply || member.over) continue;
    std::string& names = member.link->greeted() ? reading : unreached;
    names += cat(names.empty() ? "" : ", ", member.host.name);
  }
  const auto warn = [&](const std::string& names, const char* why) {
    if (names.empty()) return;
    notices.warning("no answer yet from ", names, ": ", why, "; waiting, ",
                    options.connect_timeout_seconds + options.check_timeout_seconds,
                    " s in all (--connect_timeout, --check_timeout)");
  };
  warn(unreached, "ssh has not got in");
  warn(reading, "ds-launch there still reads the program");
}

std::vector<HostAnswer> answers_of(const HostMembers& members, const Options& options) {
  std::vector<HostAnswer> answers;
  for (const HostMember& member : members) {
    const std::string silent =
        cat("no answer within ", options.connect_timeout_seconds + options.check_timeout_seconds, " s",
            member.link->greeted() ? "; its ds-launch runs, but is slow to read the program: raise --check_timeout"
                                   : cat("; see whether `ssh ", member.host.name, " true` ends"));
    answers.push_back({member.host.name, member.reply, member.trouble.empty() ? silent : member.trouble});
  }
  return answers;
}

bool report_trouble(const HostMembers& members, const Options& options, const OwnProgram& own, Notices& notices) {
  const std::vector<std::string> lines = compare_answers(answers_of(members, options), own.hash);
  if (lines.empty()) return false;
  notices.error("nothing was started, because not all of the ", members.size(), " hosts are ready:");
  for (const std::string& line : lines) notices.error("  ", line);
  return true;
}

int exit_code_of_trouble(const HostMembers& members) {
  std::vector<HostAnswer> answers;
  for (const HostMember& member : members) answers.push_back({member.host.name, member.reply, member.trouble});
  return exit_code_of(answers);
}

void order_start(HostMembers& members, const Options& options, Notices& notices) {
  StartRequest start{.nodes = static_cast<int>(members.size()),
                     .master_addr = members.front().reply->address,
                     .master_port = members.front().reply->port};
  start.world_size = 0;
  for (const HostMember& member : members) start.world_size += static_cast<int>(member.host.slots.size());
  for (HostMember& member : members) {
    for (const std::string& note : member.reply->notes) notices.info(member.host.name, ": ", note);
    for (int exchange = 0; exchange < 3; ++exchange) {
      member.link->send({.kind = MessageKind::kClock, .fields = {cat(steady_nanoseconds())}});
    }
    member.link->send(to_message(start));
    start.node += 1;
    start.first_rank += static_cast<int>(member.host.slots.size());
  }
  notices.info(start.world_size, " ranks of ", options.program, " on ", start.nodes,
               start.nodes == 1 ? " host, " : " hosts, ", start.master_addr, ':', start.master_port);
}

Selection select_hosts(HostMembers& members, size_t least, const Options& options, const OwnProgram& own,
                       Verbosity level, Notices& notices) {
  const std::vector<std::vector<std::string>> troubles = troubles_of_hosts(answers_of(members, options), own.hash);
  const auto ready = static_cast<size_t>(
      std::count_if(troubles.begin(), troubles.end(), [](const auto& lines) { return lines.empty(); }));
  Selection selection{.enough = ready >= least, .unready = {}};
  if (ready < members.size()) {
    notices.say(level, ready, " of ", members.size(), " hosts are ready",
                selection.enough ? "; going on without the others:" : cat(", ", least, " are needed:"));
  }
  for (size_t i = 0; i < members.size(); ++i) {
    if (troubles[i].empty()) continue;
    selection.unready.push_back(members[i].host);
    for (const std::string& line : troubles[i]) notices.say(level, "  ", members[i].host.name, ": ", line);
  }
  if (!selection.enough) return selection;
  const size_t most = options.max_nodes ? static_cast<size_t>(*options.max_nodes) : members.size();
  HostMembers chosen;
  for (size_t i = 0; i < members.size(); ++i) {
    if (!troubles[i].empty()) continue;
    if (chosen.size() < most) {
      chosen.push_back(std::move(members[i]));
    } else {
      notices.info("host ", members[i].host.name, " is spare (--max_nodes ", most, ')');
    }
  }
  members = std::move(chosen);
  return selection;
}

}  // namespace ds::launcher
