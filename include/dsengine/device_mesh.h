// The ranks of a job as a grid with named axes: its arithmetic, and the groups of ranks along its axes.
//
// A MeshLayout is a value without communication, safe from any thread. A DeviceMesh owns the subgroups that were asked
// for and shares the communicator they were made from. A NamedMesh has axes of any number and name, as torch's
// DeviceMesh:
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

// From the outermost (slowest, may cross hosts) to the innermost (fastest: neighbours, the busiest links).
enum class MeshAxis : uint8_t { kPipe, kData, kExpert, kSequence, kTensor };
inline constexpr int kMeshAxes = 5;

// "pipe", ...
const char* name_of(MeshAxis axis);
// "pipe", "data", "expert", "sequence", "tensor"; ConfigError naming them for anything else.
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

// Sizes of the axes; 1 = the axis is not used. Weights that are not experts are replicated along both data and expert,
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
  // With the data axis as long as the other axes leave room for. Throws ConfigError when they do not divide world_size.
  static MeshLayout fill_data(MeshSizes sizes, int world_size);

  // Ranks in all; and along an axis.
  int world_size() const;
  int size(MeshAxis axis) const { return sizes_[axis]; }

  // Position of a rank along each axis, and back.
  MeshIndex coordinates(int rank) const;
  int rank_at(const MeshIndex& coordinates) const;

  // All groups of ranks that differ along `axes` alone: a partition of the ranks, each ascending, in the order of their
  // first ranks.
  std::vector<std::vector<int>> groups(const std::vector<MeshAxis>& axes) const;
  // The one with `rank` in it.
  std::vector<int> group_of(int rank, const std::vector<MeshAxis>& axes) const;
  // "data", "data+expert" (in axis order).
  std::string group_name(const std::vector<MeshAxis>& axes) const;
  // "pipe 2 x data 4"; "data 1" for one rank.
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

  // What it was made from.
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

// A grid of ranks whose axes have names of the program's, from the outermost to the innermost, whose ranks are
// neighbours; or some of the axes, with this rank in them. Copies share their groups. One thread at a time.
class NamedMesh {
 public:
  // Its axes.
  const std::vector<std::string>& mesh_dim_names() const { return names_; }
  std::vector<int> shape() const;
  // Ranks in all; and along an axis.
  int size() const;
  int size(const std::string& name) const;

  // One axis, mesh["tp"], or several of them, in the mesh's order: mesh[{"dp", "cp"}], whose group is flat. Throws
  // ConfigError naming the axes for a name that is none.
  template <std::convertible_to<std::string> Name>
  NamedMesh operator[](const Name& name) const {
    return part({std::string(name)});
  }
  NamedMesh operator[](const std::vector<std::string>& names) const { return part(names); }
  // These axes and that one of the grid they are a part of whose group, as get_group() gives it, `group` is: of a
  // mesh["dp"] and the group of mesh["tp"] both. Nothing where no other axis has it.
  std::optional<NamedMesh> joined_with(const Communicator& group) const;

  // The ranks that differ from this one along all axes of this mesh alone, in rank order. Those of single axes are
  // there from the start; making one of several is collective over all ranks of the grid, in the same order on each.
  std::shared_ptr<Communicator> get_group() const;
  std::shared_ptr<Communicator> get_group(const std::string& name) const { return part({name}).get_group(); }
  // NOLINTNEXTLINE(google-explicit-constructor): a mesh goes where its ranks are wanted, as torch's does
  operator std::shared_ptr<Communicator>() const { return get_group(); }

  // This rank's place along each axis; along one; and in get_group().
  std::vector<int> get_coordinate() const;
  int get_local_rank(const std::string& name) const { return part({name}).get_local_rank(); }
  int get_local_rank() const;

  // For InitializeOptions::mesh. Names mean: dp, data, ddp, fsdp, dp_replicate, dp_shard data; tp, tensor; pp, pipe;
  // cp, sp, sequence; ep, expert. Throws ConfigError for other names, for axes in another order than pipe, data,
  // expert, sequence, tensor, and for a mesh that is a part of one.
  std::shared_ptr<DeviceMesh> device_mesh() const;

  // "dp 2 x tp 4; tp inside hosts, dp between them".
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

// The ranks as such a grid, the last axis innermost. `device`: of what the ranks exchange ("cuda:N" with nccl alone).
// Logs a warning where the innermost axis, the busiest, leaves a host. Throws ConfigError when sizes and names are not
// as many, a name comes twice, or the sizes do not multiply to the number of ranks. Collective.
NamedMesh init_device_mesh(std::shared_ptr<Communicator> ranks, const std::vector<int>& shape,
                           const std::vector<std::string>& names, c10::Device device = c10::kCPU);

}  // namespace ds::comm
