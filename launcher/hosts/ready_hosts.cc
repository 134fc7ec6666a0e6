#include "launcher/hosts/ready_hosts.h"

#include <algorithm>

#include "launcher/hosts/host_start.h"

namespace ds::launcher {

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
