#include "profiling/monitor_list.h"

#include <exception>

#include "core/log.h"

namespace ds::profiling {

void MonitorList::write_events(const std::vector<Event>& events) {
  std::erase_if(monitors_, [&](const std::unique_ptr<Monitor>& monitor) {
    try {
      monitor->write_events(events);
      return false;
    } catch (const std::exception& error) {
      log::error(error.what(), ". Training goes on without this monitor; what it has written stays");
      return true;
    }
  });
}

}  // namespace ds::profiling
