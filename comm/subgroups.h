// Splitting a group of ranks into groups of equal size.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "dsengine/comm.h"

namespace ds::comm {

// Split ranks 0 to size - 1, where `length` divides size, into runs of `length` consecutive ranks, or into the ranks
// that have the same place in these runs.
std::vector<std::vector<int>> consecutive_ranks(int size, int length);
std::vector<std::vector<int>> ranks_of_one_place(int size, int length);

// Makes all of these groups of `parent`, which every rank of it calls alike; returns the one that this rank is in, null
// where it is in none. `name` for all of them.
std::shared_ptr<Communicator> own_group(Communicator& parent, const std::vector<std::vector<int>>& groups,
                                        const std::string& name);

}  // namespace ds::comm
