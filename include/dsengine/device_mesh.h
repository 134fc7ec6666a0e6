// The ranks of a job as a grid with named axes, and the groups along its axes.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dsengine/comm.h"
#include "dsengine/device_mesh.h"

namespace ds::comm {

// Owns the subgroups of a communicator. Every rank of the communicator must ask for the same groups in the same order
// (asking again costs nothing): making a group is itself a collective operation. One thread at a time.
class DeviceMesh {
 public:
  // Throws ConfigError when the layout does not have as many ranks as the communicator.
  DeviceMesh(std::shared_ptr<Communicator> world, MeshLayout layout);

  const MeshLayout& layout() const { return layout_; }
  const std::shared_ptr<Communicator>& world() const { return world_; }

  // This rank's position along an axis, and the extent of the axis.
  int coordinate(MeshAxis axis) const { return layout_.coordinates(world_->rank())[axis]; }
  int size(MeshAxis axis) const { return layout_.size(axis); }

  // The ranks that differ from this one along `axes` alone, in rank order. All axes longer than one: the world itself.
  std::shared_ptr<Communicator> group(const std::vector<MeshAxis>& axes);
  std::shared_ptr<Communicator> group(MeshAxis axis) { return group(std::vector<MeshAxis>{axis}); }
  // "data", "tensor", ...; throws ConfigError naming the axes for anything else.
  std::shared_ptr<Communicator> group(const std::string& axis) { return group(parse_mesh_axis(axis)); }

 private:
  std::shared_ptr<Communicator> world_;
  MeshLayout layout_;
  std::map<std::string, std::shared_ptr<Communicator>> groups_;
};

}  // namespace ds::comm
