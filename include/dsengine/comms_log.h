// How long operations between ranks took, and with which bandwidth: the table of DeepSpeed's
// deepspeed.comm.log_summary. Needs comms_logger.enabled (docs/communication.md).
//
//   engine::log_summary(*engine);                          // rank 0 logs what it has timed so far
//   engine::log_summary(*engine, /*show_straggler=*/true);  // and who waited for whom
//
// An engine that ends without having been asked logs the table by itself. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ds::engine {

class Engine;

// Operations of one kind, group and size on this rank, since initialize(). A time is from the launch, or from the end
// of the operation before it in its group where that is later, to the end on this rank: waiting for other ranks is part
// of it.
struct CommsStatistics {
  std::string operation;   // "all_reduce"; with comms_logger.debug "all_reduce | bucket 3"
  std::string group;       // "world", "data", ...
  std::vector<int> ranks;  // of the group, as the world counts them
  int64_t message_bytes =
      0;                  // of the whole tensor: of all_gather and reduce_scatter the parts of all ranks; -1: several
  int64_t count = 0;      // that have ended
  double total_ms = 0;    // their times
  double average_ms = 0;  // of the latest 1024, without the shortest and the longest tenth, as in DeepSpeed
  double algbw_gbps = 0;  // 10^9 bits a second at the average time; all_reduce counts each byte twice, as in DeepSpeed
  double busbw_gbps = 0;  // as nccl-tests: comparable with the speed of the slowest link
};

// What this rank has timed. Waits for operations that the device was given. Throws UsageError without comms_logger.
std::vector<CommsStatistics> comms_statistics(Engine& engine);

// Rank 0 logs a table of what it has timed, and returns it; other ranks return nothing. With show_straggler, which is
// collective, also what ranks waited for one another: for each operation a rank's time is compared with the shortest
// one of its group, which is that of the rank that came last. Throws UsageError without comms_logger.
std::string log_summary(Engine& engine, bool show_straggler = false);

}  // namespace ds::engine
