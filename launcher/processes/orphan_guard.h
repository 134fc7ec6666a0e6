// Keeps processes of a job from outliving ds-launch.
//
// Note [No orphan]
// Three nets, because each has a hole:
//  * PR_SET_PDEATHSIG ends each rank when ds-launch dies, even by SIGKILL; it does not reach what the rank started.
//  * ds-launch is a child subreaper: whatever the ranks leave behind becomes its child, and sweep() ends it before
//    ds-launch does. It does not work when ds-launch itself is killed.
//  * For that there is a guard process, in a session of its own, blocked on a pipe whose other end ds-launch holds.
//    When the pipe closes without a farewell, it kills the ranks' process groups, and every process that carries this
//    job's launch id in its environment.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

#include "core/unique_fd.h"

namespace ds::launcher {

// Whether the launch ids in this environment ("A=b\0C=d\0", as in /proc/PID/environ) contain the id. Pure.
bool carries_launch_id(std::string_view environment, std::string_view id);

// Makes an id that no other launch of this machine has.
std::string new_launch_id();

class OrphanGuard {
 public:
  // Makes this process a subreaper and starts the guard. To be called before other descriptors are open.
  explicit OrphanGuard(const std::string& launch_id);
  OrphanGuard(const OrphanGuard&) = delete;
  OrphanGuard& operator=(const OrphanGuard&) = delete;
  ~OrphanGuard();

  void watch(pid_t group);   // a rank was started
  void forget(pid_t group);  // its group is empty

  // Living children of this process, the guard apart: ranks, and what they left behind.
  std::vector<pid_t> children() const;

  // Ends all children and their descendants: SIGTERM, and SIGKILL after `grace_seconds`. Returns what was found, as
  // "name (pid)". To be called when all ranks are reaped.
  std::vector<std::string> sweep(const std::vector<pid_t>& groups, double grace_seconds);

 private:
  void tell(pid_t message) const;

  pid_t guard_ = -1;
  UniqueFd pipe_;
};

}  // namespace ds::launcher
