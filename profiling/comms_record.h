// The operations of one kind, group and size in a log of communication, and the bandwidths that follow. Torch-free.
//
// Counted as DeepSpeed's comms_logger does, but for the size of reduce_scatter, which is multiplied there once more by
// the number of ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "dsengine/comm.h"

namespace ds::profiling {

inline constexpr int64_t kOtherSizes = -1;  // the size of a record that holds operations of several sizes

// Times are from the launch, or from the end of the operation before it in its group where that is later, to the end;
// waiting for other ranks included.
struct CommsRecord {
  static constexpr size_t kKept = 1024;

  std::string operation;  // "all_reduce"; with its label "all_reduce | bucket 3"
  comm::CollectiveKind kind = comm::CollectiveKind::kBarrier;
  std::string group;
  std::vector<int> ranks;  // the group's ranks, as numbers of the world
  int64_t bytes = 0;       // the size of the full tensor, see whole_bytes(); or kOtherSizes
  int64_t launched = 0;
  int64_t count = 0;  // operations that have ended
  double seconds = 0;
  double total_bytes = 0;     // the bytes of those that have ended
  std::vector<float> latest;  // seconds of the latest kKept launched, number n (from 0) at n % kKept; negative: unknown

  // Counts a launch and returns its number.
  int64_t launch();
  void end(int64_t number, double duration, int64_t moved);
  // The mean of the latest without the tenth of them that took longest and the tenth that took shortest, as
  // DeepSpeed's; 0 where none has ended.
  double average_seconds() const;
};

// Bandwidths in 10^9 bits a second.
struct Bandwidth {
  double algorithm = 0;
  double bus = 0;  // comparable with the speed of the slowest link, whatever the number of ranks (nccl-tests)
};

// The bandwidth for a full tensor of so many bytes over so many ranks; zeros for no time. The bandwidth of all_reduce
// counts each byte twice, as DeepSpeed does and nccl-tests does not.
Bandwidth bandwidth_of(comm::CollectiveKind kind, double bytes, size_t ranks, double seconds);
// The bandwidth at the average time of a record.
Bandwidth bandwidth_of(const CommsRecord& record);

// Records as bytes, to be sent to another rank, and back.
std::string to_bytes(const std::vector<CommsRecord>& records);
std::vector<CommsRecord> records_from_bytes(const std::string& bytes);

}  // namespace ds::profiling
