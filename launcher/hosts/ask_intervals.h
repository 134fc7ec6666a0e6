// How often a host that an elastic job is without is asked whether it is ready again: every 3 seconds. A host that says
// yes and cannot be used costs a restart, so each time that happens it is asked half as often, down to every 5 minutes.
#pragma once

#include <chrono>
#include <map>
#include <string>

namespace ds::launcher {

class AskIntervals {
 public:
  // The time until that host is asked again.
  std::chrono::seconds of(const std::string& host) const;

  void on_ready(const std::string& host);                          // holds until the host is used
  void on_used(const std::string& host) { doubled_.erase(host); }  // by ranks

 private:
  std::map<std::string, int> doubled_;  // how often each interval was doubled
};

}  // namespace ds::launcher
