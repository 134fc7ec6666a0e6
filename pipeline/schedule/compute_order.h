// The order in which each rank of a kind of schedule computes: its F, B, I and W, without messages. Torch-free,
// internal to pipeline/. Chunks are numbered as make_schedule() deals them: place_stages().
#pragma once

#include <vector>

#include "pipeline/schedule/action.h"
#include "pipeline/schedule/schedule.h"

namespace ds::pipeline {

using ComputeOrder = std::vector<Action>;  // what one rank computes, in order

ComputeOrder gpipe_order(const ScheduleShape& shape, int rank);
ComputeOrder one_f_one_b_order(const ScheduleShape& shape, int rank);
ComputeOrder interleaved_order(const ScheduleShape& shape, int rank);
// Forwards alone, of a rank that runs `stages` (ascending), whatever stages other ranks run.
ComputeOrder inference_order(const ScheduleShape& shape, const std::vector<int>& stages);
ComputeOrder zero_bubble_h1_order(const ScheduleShape& shape, int rank);
ComputeOrder zero_bubble_h2_order(const ScheduleShape& shape, int rank);
ComputeOrder zero_bubble_v_order(const ScheduleShape& shape, int rank);
ComputeOrder dual_pipe_v_order(const ScheduleShape& shape, int rank);

}  // namespace ds::pipeline
