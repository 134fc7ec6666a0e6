// The hosts that run ranks, and their slots: hostfiles and DeepSpeed's --include and --exclude. Pure, but for
// read_hostfile().
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ds::launcher {

inline constexpr std::string_view kDefaultHostfile = "/job/hostfile";

struct Host {
  std::string name;        // the name for ssh
  std::vector<int> slots;  // one rank for each; numbers of GPUs where the host has some

  bool operator==(const Host&) const = default;
};

// Parses lines "host slots=N"; "#" starts a comment. Order is kept. Throws ConfigError naming `file` and the line for
// anything else, a host that comes twice, and a file without hosts.
std::vector<Host> parse_hostfile(std::string_view text, const std::string& file);

// Parses "a:4,b:2", the form in which horovodrun and mpirun take hosts. Order is kept. Throws ConfigError that names
// `flag`.
std::vector<Host> parse_host_list(std::string_view text, const std::string& flag);
// Whether a word is such a list and no file: it has a colon, and there is no such file.
bool is_host_list(const std::string& text);

// Parses the hostfile `file`. Throws IoError when it cannot be read.
std::vector<Host> read_hostfile(const std::string& file);

// The two flags that choose hosts, by a text NAME[:SLOT[,SLOT]...][@NAME...]. A NAME may be user@host, as in the
// hostfile.
enum class Choice { kInclude, kExclude };

// `hosts` with only the chosen hosts and slots, or without them, in the order of `hosts`; hosts that have no slot left
// are gone. Throws ConfigError naming a host or slot that is not in `hosts`, or when nothing is left.
std::vector<Host> choose_hosts(const std::vector<Host>& hosts, Choice choice, const std::string& text);

// The first `nodes` hosts, and the first `slots` slots of each. Throws ConfigError when there are fewer; `slots_flag`
// is what the user typed.
std::vector<Host> limit_hosts(std::vector<Host> hosts, const std::optional<int>& nodes, const std::optional<int>& slots,
                              const std::string& slots_flag);

// The first `ranks` slots, host after host. Throws ConfigError when there are fewer.
std::vector<Host> limit_ranks(std::vector<Host> hosts, int ranks, const std::string& flag);

int count_slots(const std::vector<Host>& hosts);

}  // namespace ds::launcher
