// Pipeline schedules as data: which rank does what, in which order. Pure functions, torch-free; what they return is
// checked (schedule_check.h), timed (schedule_timing.h), drawn (schedule_view.h) and executed (stage_runner.h).
#pragma once

#include <string>
#include <vector>

#include "pipeline/schedule/action.h"

namespace ds::pipeline {

enum class ScheduleKind : uint8_t {
  kGPipe,        // all forwards, then all backwards (Huang et al., arXiv:1811.06965)
  k1F1B,         // one forward, one backward: at most as many activations as stages (PipeDream-Flush, arXiv:2006.09503)
  kInterleaved,  // several chunks a rank (Narayanan et al., arXiv:2104.04473)
  kZbH1,         // zero bubble with the memory of 1F1B (Qi et al., arXiv:2401.10241)
  kZbH2,         // zero bubble with about twice its memory
  kZbV,          // zero bubble with two chunks in a V and the memory of 1F1B (same authors, arXiv:2405.15362)
  kDualPipeV,    // two chunks in a V, forwards beside backwards (DeepSeek-AI, DualPipe; cut in half by Sea AI Lab)
  kInference,    // forwards only
};

// "gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zbv", "dualpipev", "inference".
const char* name_of(ScheduleKind kind);
// Case and '-' for '_' do not matter; also the names of torch.distributed.pipelining ("Interleaved1F1B",
// "ZBVZeroBubble", ...). Throws ConfigError naming all kinds, and the nearest, for anything else.
ScheduleKind parse_schedule_kind(const std::string& name);

// Chunks of a kind where nobody says how many: 2 for zbv, dualpipev and interleaved, else 1.
int default_chunks(ScheduleKind kind);

struct ScheduleShape {
  int ranks = 1;          // ranks of the pipeline
  int chunks = 1;         // stages a rank; 2 for zbv and dualpipev, 1 for gpipe, 1f1b, zb_h1 and zb_h2
  int micro_batches = 1;  // at least 1; no kind demands a multiple of anything
};

struct Schedule {
  std::string name;
  ScheduleShape shape;
  bool training = true;                      // false: forwards only
  std::vector<int> rank_of;                  // for each stage, the rank that runs it
  std::vector<std::vector<Action>> actions;  // for each rank, what it does, in order

  int stages() const { return shape.ranks * shape.chunks; }
  // Stages of a rank, ascending.
  std::vector<int> stages_of(int rank) const;
};

// How a kind deals stages to ranks: in turns (stage s to rank s mod ranks), or as a V: chunk 0 ascending, chunk 1
// descending.
std::vector<int> place_stages(ScheduleKind kind, const ScheduleShape& shape);

// The schedule of a kind. Throws ConfigError for numbers below 1 and a number of chunks that the kind does not have.
Schedule make_schedule(ScheduleKind kind, const ScheduleShape& shape);

// The schedule of forwards alone, on stages that are placed for any kind of training: `rank_of` each stage, as many
// stages on each rank. make_schedule(kInference) is this one with stages in turns.
Schedule make_inference_schedule(const ScheduleShape& shape, std::vector<int> rank_of);

// A complete schedule from the compute actions of each rank alone (F, B, I, W): adds sends after what they send,
// receives, and at the end of a training schedule REDUCE, REDUCE_TIED and STEP. A receive starts one compute action
// before the one that needs it, and the receives of a rank from one other start in the order in which that one sends,
// so that transports with one queue a pair of ranks (NCCL) never wait for each other. Between stages of one rank
// nothing is sent.
Schedule with_messages(std::string name, const ScheduleShape& shape, std::vector<int> rank_of,
                       const std::vector<std::vector<Action>>& compute);

}  // namespace ds::pipeline
