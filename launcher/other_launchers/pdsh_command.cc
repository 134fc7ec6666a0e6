#include "launcher/other_launchers/pdsh_command.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "core/check.h"
#include "launcher/command_line/shell_words.h"
#include "launcher/program/forwarded_environment.h"
#include "launcher/program/forwarded_options.h"
#include "launcher/program/rank_environment.h"

namespace ds::launcher {
namespace {

// What runs on each host. pdsh closes its standard input when pdsh ends, however that comes: then ds-launch there is
// asked to end. The hosts travel along, so that the hostfile need not be there. $1: the folder, $2: the hostfile's
// text; the rest: the command.
constexpr const char* kOnHost = R"(cd "$1" || exit 2
hosts=$2; shift 2; exec 3<&0
"$@" 3<&- 4<<END </dev/null &
$hosts
END
job=$!
(read -r end <&3; kill -TERM $job) 2>/dev/null &
watch=$!; wait $job; code=$?; kill $watch 2>/dev/null; exit $code)";

// Everybody on a host reads the command lines there, and pdsh has no other way: each host's environment may have it.
constexpr std::string_view kSecretEntry = "DS_JOB_SECRET=";

// pdsh takes %n, %h and %u for its own.
std::string with_doubled_percents(const std::string& text) {
  std::string doubled;
  for (const char c : text) doubled += c == '%' ? std::string("%%") : std::string(1, c);
  return doubled;
}

// The hosts as ds-launch there reads them: a hostfile, and what --include picks from it.
struct HostTexts {
  std::string hostfile, include;
};

HostTexts texts_of(const std::vector<Host>& hosts) {
  HostTexts texts;
  for (const Host& host : hosts) {
    const char* next = texts.hostfile.empty() ? "" : "\n";
    texts.hostfile += cat(next, host.name, " slots=", *std::max_element(host.slots.begin(), host.slots.end()) + 1);
    std::string slots;
    for (const int slot : host.slots) slots += cat(slots.empty() ? "" : ",", slot);
    texts.include += cat(texts.include.empty() ? "" : "@", host.name, ':', slots);
  }
  return texts;
}

std::string quoted(const std::string& word) { return " " + with_doubled_percents(shell_word(word)); }

std::string command_on_host(const Options& options, const ToolSetting& setting) {
  const HostTexts texts = texts_of(setting.hosts);
  std::string command = "exec sh -c" + quoted(kOnHost) + " sh" + quoted(setting.folder) + quoted(texts.hostfile);
  command += " env";
  for (const std::string& entry : setting.forwarded) {
    if (!entry.starts_with(kSecretEntry)) command += quoted(entry);
  }
  command += quoted(setting.ds_launch) + " --node_rank %n --hostfile /dev/fd/4 --include" + quoted(texts.include);
  const std::string master = master_of(options, setting.hosts);
  if (!master.empty()) command += " --master_addr" + quoted(master);
  for (const std::string& word : words_for_ranks(options)) command += quoted(word);
  return command;
}

}  // namespace

ToolCommand pdsh_command(const Options& options, const ToolSetting& setting) {
  require<ConfigError>(!setting.hosts.empty(), "--launcher pdsh needs --hostfile, for the names of the hosts");
  ToolCommand command{.words = {"pdsh", "-R", "ssh", "-S", "-b"}, .environment = setting.environment};
  const auto add = [&](const char* flag, const std::string& value) {
    command.words.emplace_back(flag);
    command.words.push_back(value);
  };
  std::string names;
  for (const Host& host : setting.hosts) names += (names.empty() ? "" : ",") + host.name;
  add("-f", cat(setting.hosts.size()));  // all at once: the ranks wait for each other
  add("-t", cat(std::max(1, static_cast<int>(std::ceil(options.connect_timeout_seconds)))));
  add("-w", names);
  if (options.ssh_port) {
    const std::string more = environment_value(setting.environment, "PDSH_SSH_ARGS_APPEND").value_or("");
    const std::string entry = cat("PDSH_SSH_ARGS_APPEND=", more, more.empty() ? "" : " ", "-p ", *options.ssh_port);
    command.environment = with_entries(command.environment, {entry});
  }
  for (std::string& word : split_words(options.launcher_args)) command.words.push_back(std::move(word));
  command.words.push_back(command_on_host(options, setting));
  return command;
}

}  // namespace ds::launcher
