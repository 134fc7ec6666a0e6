#include "pipeline/schedule/schedule_timing.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "core/check.h"
#include "pipeline/schedule/message_route.h"
#include "pipeline/schedule/schedule_check.h"
#include "pipeline/schedule/schedule_walk.h"

namespace ds::pipeline {
namespace {

double duration(ActionKind kind, const StageTimes& times) {
  switch (kind) {
    case ActionKind::kForward:
      return times.forward;
    case ActionKind::kBackward:
      return times.backward_input + times.backward_weight;
    case ActionKind::kBackwardInput:
      return times.backward_input;
    case ActionKind::kBackwardWeight:
      return times.backward_weight;
    default:
      return 0;
  }
}

void require_time(double value, const char* what) {
  require<ConfigError>(std::isfinite(value) && value >= 0, "schedule times: expected ", what, " of at least 0, found ",
                       value);
}

void require_times(const Schedule& schedule, const std::vector<StageTimes>& times,
                   const std::vector<MessageTimes>& messages) {
  require<ConfigError>(times.size() == 1 || times.size() == static_cast<size_t>(schedule.stages()),
                       "schedule times: expected one entry, for all stages, or one for each of ", schedule.stages(),
                       " stages, found ", times.size());
  for (const StageTimes& stage : times) {
    require_time(stage.forward, "a time of forward");
    require_time(stage.backward_input, "a time of backward of the input");
    require_time(stage.backward_weight, "a time of backward of the weights");
  }
  const size_t boundaries = static_cast<size_t>(schedule.stages()) - 1;
  require<ConfigError>(messages.size() == 1 || messages.size() == boundaries,
                       "schedule times: expected one entry of a message, between all stages, or one for each of ",
                       boundaries, " boundaries of stages, found ", messages.size());
  for (const MessageTimes& message : messages) {
    require_time(message.transfer, "a time of a message");
    require_time(message.latency, "a time of a message");
  }
}

// 0 of nothing.
double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

double Timetable::busy(int rank) const {
  double sum = 0;
  for (const TimedAction& timed : ranks[rank]) sum += timed.end - timed.start;
  return sum;
}

double Timetable::span(int rank) const {
  const std::vector<TimedAction>& list = ranks[rank];
  return list.empty() ? 0 : list.back().end - list.front().start;
}

double Timetable::bubble() const {
  double cost = 0;
  double work = 0;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    const double own_span = span(rank);
    const double own_work = busy(rank);
    if (own_span < cost || (own_span == cost && own_work >= work)) continue;
    cost = own_span;
    work = own_work;
  }
  return cost > 0 ? 1 - work / cost : 0;
}

double Timetable::idle() const {
  double work = 0;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) work += busy(rank);
  const double offered = makespan * static_cast<double>(ranks.size());
  return offered > 0 ? 1 - work / offered : 0;
}

Timetable simulate(const Schedule& schedule, const std::vector<StageTimes>& times, double message) {
  return simulate(schedule, times, std::vector<MessageTimes>{{.transfer = 0, .latency = message}});
}

Timetable simulate(const Schedule& schedule, const std::vector<StageTimes>& times,
                   const std::vector<MessageTimes>& messages) {
  require_sound(schedule);
  require_times(schedule, times, messages);
  const MessageRoutes routes(schedule.rank_of, schedule.shape.micro_batches);
  std::vector<double> arrival(routes.size());
  std::vector<double> clock(schedule.actions.size());
  std::map<std::pair<int, int>, double> free;  // of each way from rank to rank: when its last message has left it
  Timetable table;
  table.ranks.resize(schedule.actions.size());
  walk(schedule, routes, [&](int rank, const Action& action) {
    if (is_send(action.kind)) {
      const Message message = *routes.moved_by(action);
      const auto boundary = static_cast<size_t>(std::min(message.from, message.to));
      const MessageTimes& time = messages[messages.size() == 1 ? 0 : boundary];
      double& way = free[{rank, routes.receiver(message)}];
      way = std::max(way, clock[rank]) + time.transfer;
      arrival[routes.index(message)] = way + time.latency;
    }
    if (!is_compute(action.kind)) return;
    const auto need = routes.needed_by(action);
    const double start = need ? std::max(clock[rank], arrival[routes.index(*need)]) : clock[rank];
    clock[rank] = start + duration(action.kind, times[times.size() == 1 ? 0 : action.stage]);
    table.ranks[rank].push_back({action, start, clock[rank]});
  });
  for (const double end : clock) table.makespan = std::max(table.makespan, end);
  return table;
}

std::vector<double> peak_activations(const Schedule& schedule, double weight_share) {
  return peak_activations(schedule, std::vector<double>(static_cast<size_t>(schedule.stages()), 1.0), weight_share);
}

std::vector<double> peak_activations(const Schedule& schedule, const std::vector<double>& sizes, double weight_share) {
  require(sizes.size() == static_cast<size_t>(schedule.stages()), "peak_activations: expected a size for each of ",
          schedule.stages(), " stages, found ", sizes.size());
  std::vector<double> peaks;
  for (const std::vector<Action>& list : schedule.actions) {
    double held = 0;
    double peak = 0;
    for (const Action& action : list) {
      if (!is_compute(action.kind)) continue;
      const double size = sizes[static_cast<size_t>(action.stage)];
      if (action.kind == ActionKind::kForward) held += size;
      peak = std::max(peak, held);
      if (action.kind == ActionKind::kForward && !schedule.training) held -= size;
      if (action.kind == ActionKind::kBackward) held -= size;
      if (action.kind == ActionKind::kBackwardInput) held -= (1 - weight_share) * size;
      if (action.kind == ActionKind::kBackwardWeight) held -= weight_share * size;
    }
    peaks.push_back(peak);
  }
  return peaks;
}

std::vector<StageTimes> typical_times(const Schedule& schedule, const Timetable& measured) {
  std::vector<std::map<ActionKind, std::vector<double>>> samples(schedule.rank_of.size());
  for (const std::vector<TimedAction>& rank : measured.ranks) {
    for (const TimedAction& timed : rank) {
      samples[timed.action.stage][timed.action.kind].push_back(timed.end - timed.start);
    }
  }
  std::vector<StageTimes> times;
  for (auto& of_kind : samples) {
    const double input = median(of_kind[ActionKind::kBackwardInput]);
    const double weight = median(of_kind[ActionKind::kBackwardWeight]);
    const double half = median(of_kind[ActionKind::kBackward]) / 2;
    const bool in_parts = !of_kind[ActionKind::kBackwardInput].empty();
    times.push_back({median(of_kind[ActionKind::kForward]), in_parts ? input : half, in_parts ? weight : half});
  }
  return times;
}

}  // namespace ds::pipeline
