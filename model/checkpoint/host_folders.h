// Which ranks keep their parts of a checkpoint in one folder: all of them or, with checkpoint.use_node_local_storage,
// those of a host.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "model/state/ranks.h"

namespace ds::engine {

// The folders of a checkpoint and the ranks that write into each.
struct HostFolders {
  std::vector<int> host_of;  // the host of each rank of the job, from 0
  std::vector<int> leaders;  // the first rank of each host: does there what rank 0 does where there is one folder
  int rank = 0;              // this one

  bool apart() const { return leaders.size() > 1; }
  int leader() const { return leaders[static_cast<size_t>(host_of[static_cast<size_t>(rank)])]; }
  bool leads() const { return leader() == rank; }
  bool shares(int other) const { return host_of[static_cast<size_t>(other)] == host_of[static_cast<size_t>(rank)]; }
  // Returns this rank's place among those of `holders` that share its folder, and their number. `holders` are ranks
  // that hold the same, this one among them.
  std::pair<int, int> place_among(const std::vector<int>& holders) const;
};

// Returns one folder for all ranks.
HostFolders one_folder(const Ranks& ranks);
// Returns a folder for each host: ranks that share memory, from one with local rank 0 to the next. Collective.
HostFolders host_folders(const Ranks& ranks);

// Returns the ranks of the job with the same part of the model as this one.
std::vector<int> ranks_of_part(const Ranks& ranks);
// Returns the ranks of the job that own the same slices as this one.
std::vector<int> ranks_of_slice(const Ranks& ranks);

// Returns `holders` with all ranks of their tensor axes, ascending.
std::vector<int> with_tensor_axes(const std::vector<int>& holders, const Ranks& ranks);

// Returns the text of the first rank that shares this one's folder. Collective.
std::string text_of_leader(const std::string& text, const HostFolders& folders, const Ranks& ranks);

}  // namespace ds::engine
