#include "pipeline/schedule/schedule_drawing.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/text.h"

namespace ds::pipeline {

std::vector<LegendEntry> legend_of(const Timetable& timetable) {
  std::vector<LegendEntry> entries;
  for (const LegendEntry& entry : kLegend) {
    const bool there = std::any_of(timetable.ranks.begin(), timetable.ranks.end(), [&](const auto& list) {
      return std::any_of(list.begin(), list.end(), [&](const auto& timed) { return timed.action.kind == entry.kind; });
    });
    if (there) entries.push_back(entry);
  }
  return entries;
}

std::vector<int> chunk_of_stages(const Schedule& schedule) {
  std::vector<int> chunks;
  std::vector<int> count(schedule.actions.size());
  for (const int rank : schedule.rank_of) chunks.push_back(count[rank]++);
  return chunks;
}

double shortest_action(const Timetable& timetable) {
  double shortest = 0;
  for (const std::vector<TimedAction>& list : timetable.ranks) {
    for (const TimedAction& timed : list) {
      const double duration = timed.end - timed.start;
      if (duration > 0 && (shortest == 0 || duration < shortest)) shortest = duration;
    }
  }
  return shortest;
}

double column_time(const Timetable& timetable) {
  std::vector<double> durations;
  for (const std::vector<TimedAction>& list : timetable.ranks) {
    for (const TimedAction& timed : list) {
      if (timed.end > timed.start) durations.push_back(timed.end - timed.start);
    }
  }
  if (durations.empty()) return 0;
  const auto middle = durations.begin() + static_cast<std::ptrdiff_t>(durations.size() / 2);
  std::nth_element(durations.begin(), middle, durations.end());
  const double shortest = shortest_action(timetable);
  return shortest < *middle / 4 ? *middle / 2 : shortest;
}

double round_step(double least) {
  double step = std::pow(10, std::floor(std::log10(least)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * step >= least) return factor * step;
  }
  return 10 * step;
}

std::string short_number(double value) { return cat(value); }

}  // namespace ds::pipeline
