#include "model/checkpoint/host_folders.h"

#include <map>

#include "comm/agreement.h"
#include "core/check.h"

namespace ds::engine {

std::pair<int, int> HostFolders::place_among(const std::vector<int>& holders) const {
  int place = -1;
  int count = 0;
  for (const int holder : holders) {
    if (!shares(holder)) continue;
    if (holder == rank) place = count;
    ++count;
  }
  ensure(place >= 0, "a rank is among those that hold what it holds");
  return {place, count};
}

HostFolders one_folder(const Ranks& ranks) {
  return {.host_of = std::vector<int>(static_cast<size_t>(ranks.world->size()), 0),
          .leaders = {0},
          .rank = ranks.world->rank()};
}

HostFolders host_folders(const Ranks& ranks) {
  const std::vector<int> memory = comm::hosts_of(*ranks.world, ranks.device);
  const std::vector<int64_t> local =
      comm::numbers_of_ranks(*ranks.world, ranks.device, {ranks.local_rank}, "local ranks");
  HostFolders folders{.host_of = {}, .leaders = {}, .rank = ranks.world->rank()};
  std::map<int, int> open;  // of ranks that share memory, the host that has been found last
  for (size_t rank = 0; rank < memory.size(); ++rank) {
    const bool begins = local[rank] == 0 || !open.contains(memory[rank]);
    if (begins) {
      open[memory[rank]] = static_cast<int>(folders.leaders.size());
      folders.leaders.push_back(static_cast<int>(rank));
    }
    folders.host_of.push_back(open[memory[rank]]);
  }
  return folders;
}

std::vector<int> ranks_of_part(const Ranks& ranks) {
  std::vector<int> holders;
  for (int i = 0; i < ranks.part->size(); ++i) holders.push_back(ranks.first_of_part() + i * ranks.tensor_ranks());
  return holders;
}

std::vector<int> ranks_of_slice(const Ranks& ranks) {
  const comm::Communicator& shards = *ranks.groups.shards;
  std::vector<int> holders;
  for (const int holder : ranks_of_part(ranks)) {
    const int place = (holder - ranks.first_of_part()) / ranks.tensor_ranks() % shards.size();
    if (place == shards.rank()) holders.push_back(holder);
  }
  return holders;
}

std::vector<int> with_tensor_axes(const std::vector<int>& holders, const Ranks& ranks) {
  std::vector<int> all;
  for (const int holder : holders) {
    const int first = holder - holder % ranks.tensor_ranks();
    for (int i = 0; i < ranks.tensor_ranks(); ++i) all.push_back(first + i);
  }
  return all;
}

std::string text_of_leader(const std::string& text, const HostFolders& folders, const Ranks& ranks) {
  std::string result;
  for (const int leader : folders.leaders) {
    std::string found = comm::text_of_rank(text, leader, ranks.device, *ranks.world);
    if (leader == folders.leader()) result = std::move(found);
  }
  return result;
}

}  // namespace ds::engine
