// The command line that starts ds-launch on another host. Pure.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ds::launcher {

struct SshSettings {
  std::optional<int> port;
  std::string more_words;                         // --launcher_args
  double connect_timeout = 5, link_timeout = 30;  // seconds
};

// `text` as one word of a POSIX shell, csh or fish.
std::string shell_word(std::string_view text);

// Words as a shell splits them: blanks, '...', "..." and backslashes; nothing is expanded. Throws ConfigError for a
// quote without end.
std::vector<std::string> split_words(std::string_view text);

// argv of ssh. The user's words stand first, because ssh takes the first value that it reads for an option.
std::vector<std::string> ssh_command(const SshSettings& settings, const std::string& host, const std::string& command);

// What to do about a connection that ssh could not make; `said`: its own last words. `try_it`: a command to try.
std::string ssh_advice(const std::vector<std::string>& said, const std::string& try_it);

}  // namespace ds::launcher
