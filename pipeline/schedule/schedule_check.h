// Proves a schedule before it runs. Torch-free.
#pragma once

#include <string>
#include <vector>

#include "pipeline/schedule/schedule.h"

namespace ds::pipeline {

// Every mistake that was found, each naming rank, position and action; empty: the schedule is sound. It is when
// - every stage does each micro-batch once (F; in training B, or I and later W, after F), on the rank that has the
// stage;
// - every message between stages on different ranks is sent once, after it was computed, and received once, before it
// is
//   used, and between stages of one rank there is none;
// - between two ranks, in each direction, messages are received in the order in which they are sent;
// - the ranks never wait for one another in a circle (sends do not wait for their receivers); a circle is printed;
// - REDUCE, REDUCE_TIED and STEP come once, in this order, at the end, on every rank alike; never in inference.
// Where there are more than a hundred problems, the first ones are returned and how many more there are. A circle is
// looked for once all else is right.
std::vector<std::string> schedule_problems(const Schedule& schedule);

// Throws ConfigError with all of them.
void require_sound(const Schedule& schedule);

}  // namespace ds::pipeline
