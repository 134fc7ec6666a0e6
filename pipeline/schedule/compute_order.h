// The orders of the built-in schedules (GPipe, 1F1B, interleaved, zero bubble, DualPipeV, inference): which forwards
// and backwards (F, B, I, W) each rank computes when, without messages. Executed by pipeline/stage_runner.h.
// Torch-free, internal to pipeline/. Chunks are numbered as make_schedule() deals them: place_stages().
#pragma once

#include <vector>

#include "pipeline/schedule/action.h"
#include "pipeline/schedule/schedule.h"

namespace ds::pipeline {

// The computations of one rank, in order.
using ComputeOrder = std::vector<Action>;

ComputeOrder gpipe_order(const ScheduleShape& shape, int rank);
ComputeOrder one_f_one_b_order(const ScheduleShape& shape, int rank);
ComputeOrder interleaved_order(const ScheduleShape& shape, int rank);
// Returns the forwards of a rank that runs `stages` (ascending), whatever stages other ranks run.
ComputeOrder inference_order(const ScheduleShape& shape, const std::vector<int>& stages);
ComputeOrder zero_bubble_h1_order(const ScheduleShape& shape, int rank);
ComputeOrder zero_bubble_h2_order(const ScheduleShape& shape, int rank);
ComputeOrder zero_bubble_v_order(const ScheduleShape& shape, int rank);
ComputeOrder dual_pipe_v_order(const ScheduleShape& shape, int rank);

}  // namespace ds::pipeline
