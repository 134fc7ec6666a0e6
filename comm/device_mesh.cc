#include "dsengine/device_mesh.h"

#include <algorithm>

#include "comm/subgroups.h"
#include "core/check.h"

namespace ds::comm {

DeviceMesh::DeviceMesh(std::shared_ptr<Communicator> world, MeshLayout layout)
    : world_(std::move(world)), layout_(layout) {
  require<ConfigError>(layout_.world_size() == world_->size(), "mesh: ", lazy([&] { return layout_.text(); }), " has ",
                       layout_.world_size(), " ranks, but the job has ", world_->size(),
                       ". Change the sizes of the axes or the number of ranks");
}

std::shared_ptr<Communicator> DeviceMesh::group(const std::vector<MeshAxis>& axes) {
  const std::string name = layout_.group_name(axes);
  const auto known = groups_.find(name);
  if (known != groups_.end()) return known->second;
  const auto lists = layout_.groups(axes);
  const auto own = lists.size() == 1 ? world_ : own_group(*world_, lists, name);
  ensure(own != nullptr, "every rank is in one group of each kind");
  groups_.emplace(name, own);
  return own;
}

}  // namespace ds::comm
