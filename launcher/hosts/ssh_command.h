// The command line that starts ds-launch on another host. Pure.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace ds::launcher {

struct SshSettings {
  std::optional<int> port;
  std::string more_words;                         // --launcher_args
  double connect_timeout = 5, link_timeout = 30;  // seconds
};

// The argv of ssh. The user's words stand first, because ssh takes the first value that it reads for an option.
std::vector<std::string> ssh_command(const SshSettings& settings, const std::string& host, const std::string& command);

// Says what to do about a connection that ssh could not make. `said`: the last words of ssh; `try_it`: a command to
// try.
std::string ssh_advice(const std::vector<std::string>& said, const std::string& try_it);

}  // namespace ds::launcher
