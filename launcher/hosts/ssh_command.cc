#include "launcher/hosts/ssh_command.h"

#include <algorithm>
#include <cmath>

#include "core/text.h"
#include "launcher/command_line/shell_words.h"

namespace ds::launcher {
namespace {

constexpr int kMissedAnswers = 3;

bool any_says(const std::vector<std::string>& lines, std::string_view text) {
  return std::any_of(lines.begin(), lines.end(),
                     [&](const std::string& line) { return line.find(text) != std::string::npos; });
}

}  // namespace

std::vector<std::string> ssh_command(const SshSettings& settings, const std::string& host, const std::string& command) {
  std::vector<std::string> words = {"ssh"};
  for (std::string& word : split_words(settings.more_words)) words.push_back(std::move(word));
  if (settings.port) {
    words.emplace_back("-p");
    words.push_back(cat(*settings.port));
  }
  const auto option = [&](const auto&... parts) {
    words.emplace_back("-o");
    words.push_back(cat(parts...));
  };
  option("BatchMode=yes");     // nobody is there to type a password
  option("ControlMaster=no");  // a master of ours would take the connections of others along when it ends
  option("ConnectTimeout=", std::max(1, static_cast<int>(std::ceil(settings.connect_timeout))));
  if (settings.link_timeout > 0) {
    option("ServerAliveInterval=", std::max(1, static_cast<int>(settings.link_timeout / kMissedAnswers)));
    option("ServerAliveCountMax=", kMissedAnswers);
  }
  for (const char* word : {"-x", "-T", "--"}) words.emplace_back(word);
  words.push_back(host);
  words.push_back(command);
  return words;
}

std::string ssh_advice(const std::vector<std::string>& said, const std::string& try_it) {
  if (any_says(said, "Host key verification failed")) {
    return cat("its key is not known or has changed: run `", try_it, "` once and answer, or add --launcher_args '-o ",
               "StrictHostKeyChecking=accept-new'");
  }
  if (any_says(said, "Permission denied")) {
    return cat("ssh has to get in without a password: copy your public key there (ssh-copy-id), then try `", try_it,
               "`");
  }
  if (any_says(said, "Could not resolve hostname")) {
    return "the name is unknown here: correct the hostfile, or add it to ~/.ssh/config or /etc/hosts";
  }
  if (any_says(said, "Connection refused")) {
    return cat("no sshd listens there: start it, or name its port with --ssh_port; try `", try_it, "`");
  }
  return cat("is it running and on this network? Try `", try_it, "`; --exclude leaves it out");
}

}  // namespace ds::launcher
