#include "comm/subgroups.h"

#include <utility>

namespace ds::comm {

std::vector<std::vector<int>> consecutive_ranks(int size, int length) {
  std::vector<std::vector<int>> groups(static_cast<size_t>(size / length));
  for (int rank = 0; rank < size; ++rank) groups[static_cast<size_t>(rank / length)].push_back(rank);
  return groups;
}

std::vector<std::vector<int>> ranks_of_one_place(int size, int length) {
  std::vector<std::vector<int>> groups(static_cast<size_t>(length));
  for (int rank = 0; rank < size; ++rank) groups[static_cast<size_t>(rank % length)].push_back(rank);
  return groups;
}

std::shared_ptr<Communicator> own_group(Communicator& parent, const std::vector<std::vector<int>>& groups,
                                        const std::string& name) {
  std::shared_ptr<Communicator> own;
  for (const std::vector<int>& ranks : groups) {
    if (auto made = parent.new_group(ranks, name)) own = std::move(made);
  }
  return own;
}

}  // namespace ds::comm
