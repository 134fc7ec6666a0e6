// The ranks of a job as a grid with named axes: its arithmetic, and the groups of ranks along its axes.
//
// A MeshLayout is a value without communication, safe from any thread. A DeviceMesh owns the subgroups that it was
// asked for and shares the communicator they were made from. A NamedMesh has any number of axes with any names, as
// torch's DeviceMesh:
//
//   auto mesh = ds::comm::init_device_mesh(ranks, {2, 4}, {"dp", "tp"});
//   auto split = ds::parallel::parallelize_module(*model, mesh["tp"], rules);
//   mesh["dp"].get_group()->all_reduce(gradient).wait();
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/comm.h"

namespace ds::comm {

// The axes, from the outermost (slowest, may cross hosts) to the innermost (fastest: neighbours, the busiest links).
enum class MeshAxis : uint8_t { kPipe, kData, kExpert, kSequence, kTensor };
inline constexpr int kMeshAxes = 5;

// Returns the name of an axis: "pipe", ...
const char* name_of(MeshAxis axis);
// Returns the axis of a name: "pipe", "data", "expert", "sequence", "tensor"; ConfigError lists them for another one.
MeshAxis parse_mesh_axis(const std::string& name);

// One number for each axis.
class MeshIndex {
 public:
  int& operator[](MeshAxis axis) { return values_[static_cast<size_t>(axis)]; }
  int operator[](MeshAxis axis) const { return values_[static_cast<size_t>(axis)]; }
  bool operator==(const MeshIndex&) const = default;

 private:
  std::array<int, kMeshAxes> values_{};
};

// Sizes of the axes; 1: the axis is not used. Weights that are not experts are replicated along both data and expert,
// so their gradients are reduced over the group {data, expert}.
struct MeshSizes {
  int pipe = 1;
  int data = 1;
  int expert = 1;
  int sequence = 1;
  int tensor = 1;
};

// The arithmetic of a grid of ranks: which rank is where.
class MeshLayout {
 public:
  // Throws ConfigError naming the axis when a size is below 1.
  explicit MeshLayout(const MeshSizes& sizes);
  // Returns a layout of world_size ranks, whose data axis takes what the other axes leave. Throws ConfigError when
  // these do not divide world_size.
  static MeshLayout fill_data(MeshSizes sizes, int world_size);

  // The number of ranks in all, and along an axis.
  int world_size() const;
  int size(MeshAxis axis) const { return sizes_[axis]; }

  // The position of a rank along each axis, and the rank at a position.
  MeshIndex coordinates(int rank) const;
  int rank_at(const MeshIndex& coordinates) const;

  // Returns all groups of ranks that differ along `axes` alone: a partition of the ranks. Each group ascends; groups
  // are ordered by their first ranks.
  std::vector<std::vector<int>> groups(const std::vector<MeshAxis>& axes) const;
  // Returns the group that has `rank` in it.
  std::vector<int> group_of(int rank, const std::vector<MeshAxis>& axes) const;
  // Returns the name of such groups: "data", "data+expert" (in axis order).
  std::string group_name(const std::vector<MeshAxis>& axes) const;
  // Describes the layout: "pipe 2 x data 4"; "data 1" for one rank.
  std::string text() const;

 private:
  MeshIndex sizes_;
};

// Owns the subgroups of a communicator. Every rank of the communicator must ask for the same groups in the same order
// (asking again costs nothing): making a group is itself a collective operation. One thread at a time.
class DeviceMesh {
 public:
  // Throws ConfigError when the layout does not have as many ranks as the communicator.
  DeviceMesh(std::shared_ptr<Communicator> world, MeshLayout layout);

  // The layout and the communicator that it was made from.
  const MeshLayout& layout() const { return layout_; }
  const std::shared_ptr<Communicator>& world() const { return world_; }

  // This rank's position along an axis, and the length of the axis.
  int coordinate(MeshAxis axis) const { return layout_.coordinates(world_->rank())[axis]; }
  int size(MeshAxis axis) const { return layout_.size(axis); }

  // Returns the group of ranks that differ from this one along `axes` alone, in rank order; the world itself where
  // these are all axes longer than one.
  std::shared_ptr<Communicator> group(const std::vector<MeshAxis>& axes);
  std::shared_ptr<Communicator> group(MeshAxis axis) { return group(std::vector<MeshAxis>{axis}); }
  // Takes the axis by name: "data", "tensor", ...; ConfigError lists the axes for another one.
  std::shared_ptr<Communicator> group(const std::string& axis) { return group(parse_mesh_axis(axis)); }

 private:
  std::shared_ptr<Communicator> world_;
  MeshLayout layout_;
  std::map<std::string, std::shared_ptr<Communicator>> groups_;
};

// A grid of ranks whose axes have names of the program's, from the outermost to the innermost, whose ranks are
// neighbours; or a part of such a grid: some of its axes, with this rank in them. Copies share their groups. One thread
// at a time.
class NamedMesh {
 public:
  // The names of its axes, and their sizes.
  const std::vector<std::string>& mesh_dim_names() const { return names_; }
  std::vector<int> shape() const;
  // The number of ranks in all, and along an axis.
  int size() const;
  int size(const std::string& name) const;

  // Returns one axis, mesh["tp"], or several in the mesh's order, mesh[{"dp", "cp"}], with one flat group. ConfigError
  // lists the axes for a name that is none.
  template <std::convertible_to<std::string> Name>
  NamedMesh operator[](const Name& name) const {
    return part({std::string(name)});
  }
  NamedMesh operator[](const std::vector<std::string>& names) const { return part(names); }
  // Returns the mesh of these axes and one more axis of the whole grid, the one whose get_group() is `group`. For
  // mesh["dp"] and the group of mesh["tp"] that is mesh[{"dp", "tp"}]. Nothing where no other axis has that group.
  std::optional<NamedMesh> joined_with(const Communicator& group) const;

  // Returns the group of ranks that differ from this one along the axes of this mesh alone, in rank order. Groups of
  // single axes are there from the start; making a group of several axes is collective over all ranks of the grid, in
  // the same order on each.
  std::shared_ptr<Communicator> get_group() const;
  std::shared_ptr<Communicator> get_group(const std::string& name) const { return part({name}).get_group(); }
  // NOLINTNEXTLINE(google-explicit-constructor): a mesh goes where its ranks are wanted, as torch's does
  operator std::shared_ptr<Communicator>() const { return get_group(); }

  // This rank's position along each axis, along one axis, and in get_group().
  std::vector<int> get_coordinate() const;
  int get_local_rank(const std::string& name) const { return part({name}).get_local_rank(); }
  int get_local_rank() const;

  // Converts the grid for InitializeOptions::mesh. The names data, dp, ddp, fsdp, dp_replicate and dp_shard mean the
  // axis data; tensor, tp: tensor; pipe, pp: pipe; sequence, sp, cp: sequence; expert, ep: expert. Throws ConfigError
  // for other names, for axes in another order than pipe, data, expert, sequence, tensor, and for a part of a grid.
  std::shared_ptr<DeviceMesh> device_mesh() const;

  // Describes the mesh: "dp 2 x tp 4; tp inside hosts, dp between them".
  std::string text() const;

 private:
  struct Grid;
  friend NamedMesh init_device_mesh(std::shared_ptr<Communicator> ranks, const std::vector<int>& shape,
                                    const std::vector<std::string>& names, c10::Device device);
  NamedMesh(std::shared_ptr<Grid> grid, std::vector<std::string> names)
      : grid_(std::move(grid)), names_(std::move(names)) {}
  NamedMesh part(const std::vector<std::string>& names) const;

  std::shared_ptr<Grid> grid_;
  std::vector<std::string> names_;
};

// Makes a grid of the ranks, the last axis innermost. `device` is where the exchanged tensors are ("cuda:N" with nccl
// alone). Logs a warning where the innermost axis, the busiest, leaves a host. Throws ConfigError when there are more
// or fewer sizes than names, a name comes twice, or the sizes do not multiply to the number of ranks. Collective.
NamedMesh init_device_mesh(std::shared_ptr<Communicator> ranks, const std::vector<int>& shape,
                           const std::vector<std::string>& names, c10::Device device = c10::kCPU);

}  // namespace ds::comm
