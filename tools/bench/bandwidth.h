// Sizes and bandwidths of collectives, counted as nccl-tests counts them. Pure, torch-free.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace ds::tool::bench {

enum class Operation : uint8_t {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kBroadcast,
  kReduce,
  kAllToAll,
  kSendRecv,  // every rank sends to the next one and receives from the one before
  kBarrier,
};

inline constexpr std::array<const char*, 8> kOperationNames = {
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "sendrecv", "barrier"};

const char* name_of(Operation operation);
// The operation of that name, or every one for "all". Throws ConfigError that lists the names.
std::vector<Operation> parse_operations(const std::string& text);

// The data that one call moves.
struct Amount {
  int64_t count = 0;  // elements; for all_gather, reduce_scatter and all_to_all those of one rank's shard
  int64_t bytes = 0;  // of the whole tensor
};

// The amount of at most `bytes` (at least one element for each rank) that the operation can move. A barrier moves
// nothing.
Amount amount_of(Operation operation, int64_t bytes, int64_t element_bytes, int ranks);

// busbw / algbw (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, "Summary"): the factor that makes
// the bandwidth that of the slowest link, whatever the number of ranks. It is 1 for sendrecv, as in src/sendrecv.cu
// there.
double bus_factor(Operation operation, int ranks);

// The bandwidth in 10^9 bytes a second; 0 where no time has passed.
double algorithm_bandwidth(int64_t bytes, double seconds);

// Parses a number of bytes: "8", "1K", "64M", "2G", in units of 1024. `flag` is for the text of the ConfigError.
int64_t parse_size(const std::string& text, const std::string& flag);
// The sizes min, min * factor, ... up to max. Throws ConfigError when min is above max or the factor is below 2.
std::vector<int64_t> size_steps(int64_t min, int64_t max, int64_t factor);

}  // namespace ds::tool::bench
