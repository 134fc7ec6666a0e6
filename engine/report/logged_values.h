// The values that a program gives to Engine::log(), until monitors get them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "dsengine/monitor.h"
#include "model/state/model_state.h"

namespace ds::engine {

// One per engine, on all ranks; dsengine/monitor.h says what it does. Numbers of a device stay there until take(). Used
// on the engine's thread. The model outlives it.
class LoggedValues {
 public:
  explicit LoggedValues(const ModelState& model) : model_(model) {}
  ~LoggedValues();  // logs on rank 0 how many values nobody has asked for
  LoggedValues(const LoggedValues&) = delete;
  LoggedValues& operator=(const LoggedValues&) = delete;

  void add(const std::string& name, double value, const LogOptions& options);
  void add(const std::string& name, const at::Tensor& value, const LogOptions& options);

  // Gives the values that have come since the last step their place on the x-axis: a step is over.
  void step_ends(int64_t place);
  // Returns the points of all values that have a place, on rank 0, and forgets them on all ranks.
  // `epoch_place`: an epoch ends here, so that the values without a place get this one. Collective over the
  // data-parallel group. Throws UsageError on all of its ranks where they have logged other names to be joined.
  std::vector<profiling::Event> take(std::optional<int64_t> epoch_place = std::nullopt);

 private:
  // One point: the values of a name in one step, or one epoch, joined by its `reduce` but for the division of a mean.
  struct Point {
    std::string name;
    LogOptions options;
    std::optional<int64_t> place;
    int64_t calls = 0;
    std::optional<double> number;  // of the calls with numbers of the host
    at::Tensor on_device;          // float64 []: of the calls with others
  };

  // Returns the point of the name that is still open, a new one where there is none; notes a call.
  Point& open_point(const std::string& name, const LogOptions& options);
  void require_same_names(const std::vector<Point>& shared) const;
  // Returns the values of the points on the host, one after the other. `all_ranks`: those of rank 0, then those of rank
  // 1, and so on.
  at::Tensor values_of(const std::vector<Point>& points, bool all_ranks) const;

  const ModelState& model_;
  std::map<std::string, LogOptions> names_;
  std::vector<Point> points_;  // in the order of their first calls
};

}  // namespace ds::engine
