#include "launcher/hosts/lost_link_text.h"

#include <sys/wait.h>

#include <vector>

#include "core/text.h"
#include "launcher/hosts/ssh_command.h"
#include "launcher/processes/exit_cause.h"

namespace ds::launcher {
namespace {

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += (text.empty() ? "" : "; ") + line;
  return text;
}

}  // namespace

std::string why_over(const HostMember& member, const Options& options, const OwnProgram& own) {
  if (!member.trouble.empty()) return member.trouble;
  const std::vector<std::string> said = member.link->last_words();
  const std::string words = said.empty() ? "" : cat(": ", joined(said));
  const int code = exit_code_of(member.link->status());
  const std::string try_it =
      cat("ssh ", options.ssh_port ? cat("-p ", *options.ssh_port, ' ') : "", member.host.name, " true");
  if (member.link->greeted() && code == kLinkLostCode) {
    return cat(
        "ds-launch there heard nothing from this one",
        options.link_timeout_seconds > 0 ? cat(" for ", options.link_timeout_seconds, " s (--link_timeout)") : "",
        " and has ended its ranks: was this one stopped, or the network away?", words);
  }
  if (member.link->greeted() || WIFSIGNALED(member.link->status())) {
    const bool by_ssh = WIFSIGNALED(member.link->status()) || code == kHostLostCode;
    return cat(by_ssh ? "ssh: " : "ds-launch there: ", exit_words(member.link->status()), words,
               by_ssh ? "" : "; see whether someone ended it");
  }
  if (code == 127 || code == 126) {
    return cat("ds-launch does not run there as ", own.path, " (exit code ", code, words,
               "); every host needs it, with the same path, for instance through a shared file system");
  }
  if (code == kHostLostCode) return cat("ssh cannot reach it", words, "; ", ssh_advice(said, try_it));
  return cat("ds-launch did not answer, exit code ", code, words, "; is it the same version?");
}

}  // namespace ds::launcher
