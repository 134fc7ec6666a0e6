// When each action of a schedule runs, given how long each takes. Torch-free; a discrete-event simulation, linear in
// the number of actions.
#pragma once

#include <string>
#include <vector>

#include "pipeline/schedule/schedule.h"

namespace ds::pipeline {

// How long one stage takes for one micro-batch, in any one unit of time. A whole backward takes the sum of both parts.
struct StageTimes {
  double forward = 1;
  double backward_input = 1;
  double backward_weight = 1;
};

struct TimedAction {
  Action action;  // F, B, I or W
  double start = 0;
  double end = 0;
};

struct Timetable {
  std::vector<std::vector<TimedAction>> ranks;  // compute actions, in order
  double makespan = 0;                          // from the first start to the last end
  double busy(int rank) const;                  // time a rank computes
  double span(int rank) const;                  // from its first start to its last end

  // 1 - work / cost, where cost is the longest span of a rank and work the time that rank computes: the "bubble rate"
  // of the zero-bubble paper, in which ranks need not begin or end together. For gpipe and 1f1b (p-1)/(m+p-1).
  double bubble() const;
  // 1 - busy / makespan, of all ranks together: what is left where all ranks wait for one another at the step.
  double idle() const;
};

// How long one message between a stage and the next takes, in either direction and the same unit.
struct MessageTimes {
  double transfer = 0;  // keeps the way from one rank to another busy, and the next message waiting
  double latency = 0;   // on top of it, of each by itself
};

// `times` of each stage; one entry: of all of them. `message`: from the end of an action to when another rank can use
// what it sent. Throws ConfigError for a schedule that is not sound.
Timetable simulate(const Schedule& schedule, const std::vector<StageTimes>& times, double message = 0);
// Simulates with times of messages between each stage and the next: one entry fewer than stages, or one entry for all.
Timetable simulate(const Schedule& schedule, const std::vector<StageTimes>& times,
                   const std::vector<MessageTimes>& messages);

// Most activations that a rank holds at once, in micro-batches of one stage: from the start of F to the end of B or, of
// its part `weight_share` that W still needs, from the end of I to the end of W. In inference to the end of F.
std::vector<double> peak_activations(const Schedule& schedule, double weight_share = 1.0);
// Returns the peaks where a micro-batch takes sizes[stage] of memory in a stage, in any one unit.
std::vector<double> peak_activations(const Schedule& schedule, const std::vector<double>& sizes,
                                     double weight_share = 1.0);

// Times of each stage, the medians of what was measured (read_trace()), to plan with. Where only whole backwards
// were measured, each part is half of one.
std::vector<StageTimes> typical_times(const Schedule& schedule, const Timetable& measured);

// A trace of one step in Chrome's trace event format, as stage_runner writes it: complete events (ph "X") with tid =
// rank, name as to_text(), ts and dur in microseconds. Other events are left out. `path`: one file for all ranks, or a
// folder with one for each (every *.json in it). The first action starts at 0. Throws IoError for what cannot be read,
// ConfigError for a trace without each compute action of the schedule once on its rank.
Timetable read_trace(const std::string& path, const Schedule& schedule);

}  // namespace ds::pipeline
