#include "pipeline/schedule_drawing.h"

#include <algorithm>
#include <cmath>

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

double round_step(double least) {
  double step = std::pow(10, std::floor(std::log10(least)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * step >= least) return factor * step;
  }
  return 10 * step;
}

std::string short_number(double value) { return cat(value); }

}  // namespace ds::pipeline
