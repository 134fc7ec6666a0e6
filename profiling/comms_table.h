// The tables of a log of communication, and the times that ranks waited for one another. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "profiling/comms_record.h"

namespace ds::profiling {

// The times that ranks of a group waited for one another in operations of one record, as far as all of them have the
// times.
struct Straggling {
  std::string operation;
  std::string group;
  std::vector<int> ranks;
  int64_t bytes = 0;
  int64_t count = 0;                   // operations that are compared
  double communication_seconds = 0;    // sum over operations of the shortest time of a rank: the last one's to come
  std::vector<double> waited_seconds;  // by place in `ranks`: sum of what the rank's time was longer than that
};

// Compares the ranks' times. `ranks`: the records of each rank of the world. Messages between two ranks, and sizes that
// differ between ranks, are left out.
std::vector<Straggling> compare_ranks(const std::vector<std::vector<CommsRecord>>& ranks);

// The table of operations, by group and size: "0 B", "1.50 MiB", "other sizes".
std::string size_text(int64_t bytes);
std::string summary_table(const std::vector<CommsRecord>& records);
std::string straggler_table(const std::vector<Straggling>& compared);

}  // namespace ds::profiling
