#include "launcher/hosts/host_checks.h"

#include <algorithm>

#include "core/text.h"

namespace ds::launcher {
namespace {

constexpr int kNotReady = 2;

std::string short_hash(const std::string& hash) { return hash.substr(0, 8); }

// The answer whose program the most hosts have.
const HostAnswer* usual_program(const std::vector<HostAnswer>& answers) {
  const HostAnswer* best = nullptr;
  long most = 0;
  for (const HostAnswer& answer : answers) {
    if (!answer.reply || answer.reply->program_hash.empty()) continue;
    const long same = std::count_if(answers.begin(), answers.end(), [&](const HostAnswer& other) {
      return other.reply && other.reply->program_hash == answer.reply->program_hash;
    });
    if (same > most) {
      most = same;
      best = &answer;
    }
  }
  return best;
}

}  // namespace

std::vector<std::vector<std::string>> troubles_of_hosts(const std::vector<HostAnswer>& answers,
                                                        const std::string& launcher) {
  std::vector<std::vector<std::string>> troubles;
  const HostAnswer* usual = usual_program(answers);
  for (const HostAnswer& answer : answers) {
    std::vector<std::string>& lines = troubles.emplace_back();
    const auto add = [&](const auto&... parts) { lines.push_back(cat(parts...)); };
    if (!answer.reply) {
      add(answer.no_reply_because);
      continue;
    }
    const CheckReply& reply = *answer.reply;
    for (const std::string& problem : reply.problems) add(problem);
    if (!reply.launcher_hash.empty() && reply.launcher_hash != launcher) {
      add("its ds-launch is another file than the one that runs here; install the same one on every host");
    }
    if (reply.program_hash.empty() || reply.program_hash == usual->reply->program_hash) continue;
    add(reply.program, " is another file than on ", usual->host, " (XXH3 ", short_hash(reply.program_hash), "... and ",
        short_hash(usual->reply->program_hash), "...); copy it there, or start it from a shared folder");
  }
  return troubles;
}

std::vector<std::string> compare_answers(const std::vector<HostAnswer>& answers, const std::string& launcher) {
  const std::vector<std::vector<std::string>> troubles = troubles_of_hosts(answers, launcher);
  std::vector<std::string> lines;
  for (size_t i = 0; i < answers.size(); ++i) {
    for (const std::string& trouble : troubles[i]) lines.push_back(cat(answers[i].host, ": ", trouble));
  }
  return lines;
}

int exit_code_of(const std::vector<HostAnswer>& answers) {
  for (const HostAnswer& answer : answers) {
    if (answer.reply && answer.reply->exit_code != 0) return answer.reply->exit_code;
  }
  return kNotReady;
}

}  // namespace ds::launcher
