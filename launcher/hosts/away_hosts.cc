#include "launcher/hosts/away_hosts.h"

#include <algorithm>

#include "core/check.h"
#include "launcher/command_line/seconds.h"
#include "launcher/hosts/host_start.h"

namespace ds::launcher {

AwayHosts::AwayHosts(const Options& options, const std::vector<std::string>& environment, const OwnProgram& own,
                     AskIntervals& intervals, Notices& notices)
    : options_(options), environment_(environment), own_(own), intervals_(intervals), notices_(notices) {
  options_.master_addr.clear();  // an address of the first host: that one may be here, or run ranks
}

void AwayHosts::add(const Host& host) {
  Asked& asked = asked_.emplace_back();
  asked.host.emplace_back().host = host;
  ask_later(asked);
}

void AwayHosts::append_waits(std::vector<pollfd>& waits) const {
  for (const Asked& asked : asked_) {
    if (asked.host[0].link) asked.host[0].link->append_waits(waits, true);
  }
}

std::optional<AwayHosts::Clock::time_point> AwayHosts::next_time() const {
  if (asked_.empty()) return std::nullopt;
  return std::min_element(asked_.begin(), asked_.end(), [](const Asked& a, const Asked& b) { return a.next < b.next; })
      ->next;
}

std::vector<std::string> AwayHosts::look(const std::string& program) {
  std::vector<std::string> ready;
  for (Asked& asked : asked_) {
    HostMember& host = asked.host[0];
    if (host.link) take_answer(asked);
    const bool answered = host.link && host.reply && !host.over;
    const std::string trouble = answered ? trouble_of(*host.reply, program) : "";
    if (answered && trouble.empty()) {
      ready.push_back(host.host.name);
      intervals_.on_ready(host.host.name);
      host.link->kill();
      continue;
    }
    if (answered && trouble != asked.said) {
      notices_.warning("host ", host.host.name, " answers again, but is not ready: ", trouble);
      asked.said = trouble;
    }
    if (host.link && (host.over || host.reply || Clock::now() >= asked.next)) {
      host.link.reset();
      ask_later(asked);
    } else if (!host.link && Clock::now() >= asked.next) {
      ask(asked);
    }
  }
  std::erase_if(asked_, [&](const Asked& asked) {
    return std::find(ready.begin(), ready.end(), asked.host[0].host.name) != ready.end();
  });
  return ready;
}

void AwayHosts::ask(Asked& asked) {
  HostMember& host = asked.host[0];
  host.reply.reset();
  host.over = false;
  try {
    ask_hosts(asked.host, options_, environment_, own_, notices_);
    asked.next = Clock::now() + in_seconds(options_.connect_timeout_seconds + options_.check_timeout_seconds);
  } catch (const Error& error) {  // the ranks that run are not to suffer
    notices_.debug("host ", host.host.name, ": ", error.what());
    ask_later(asked);
  }
}

void AwayHosts::ask_later(Asked& asked) const { asked.next = Clock::now() + intervals_.of(asked.host[0].host.name); }

void AwayHosts::take_answer(Asked& asked) {
  HostMember& host = asked.host[0];
  try {
    host.link->write_some();
    for (const Message& message : host.link->read(true)) {
      if (message.kind == MessageKind::kChecked) host.reply = check_reply(message);
    }
    host.over = host.link->over();
  } catch (const Error& error) {  // as above
    notices_.debug("host ", host.host.name, ": ", error.what());
    host.over = true;
  }
}

// Empty: none.
std::string AwayHosts::trouble_of(const CheckReply& reply, const std::string& program) const {
  if (!reply.problems.empty()) return reply.problems.front();
  if (reply.launcher_hash != own_.hash) return "its ds-launch is another file than the one that runs here";
  return reply.program_hash == program ? "" : cat(reply.program, " is another file than the one that runs");
}

std::vector<std::string> AwayHosts::still_away() const {
  std::vector<std::string> names;
  for (const Asked& asked : asked_) names.push_back(asked.host[0].host.name);
  return names;
}

}  // namespace ds::launcher
