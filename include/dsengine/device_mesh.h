// The ranks of a job as a grid with named axes: its arithmetic, and the groups of ranks along its axes. Torch-free.
//
// A MeshLayout is a value without communication, safe from any thread. A DeviceMesh owns the subgroups that were asked
// for and shares the communicator they were made from.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
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

}  // namespace ds::comm
