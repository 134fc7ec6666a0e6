// The monitors of a run. Torch-free.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "profiling/monitor.h"

namespace ds::profiling {

// Curves are not worth a run: a monitor that cannot write any more (a full disk) is dropped, and the log says so once.
// Not thread safe.
class MonitorList {
 public:
  void add(std::unique_ptr<Monitor> monitor) { monitors_.push_back(std::move(monitor)); }
  bool empty() const { return monitors_.empty(); }
  // Throws nothing that a monitor throws.
  void write_events(const std::vector<Event>& events);

 private:
  std::vector<std::unique_ptr<Monitor>> monitors_;
};

}  // namespace ds::profiling
