#include "dsengine/device_mesh.h"

#include <algorithm>

#include "core/check.h"

namespace ds::comm {
namespace {

constexpr std::array<MeshAxis, kMeshAxes> kAxes = {MeshAxis::kPipe, MeshAxis::kData, MeshAxis::kExpert,
                                                   MeshAxis::kSequence, MeshAxis::kTensor};

bool contains(const std::vector<MeshAxis>& axes, MeshAxis axis) {
  return std::find(axes.begin(), axes.end(), axis) != axes.end();
}

}  // namespace

const char* name_of(MeshAxis axis) {
  static constexpr const char* kNames[kMeshAxes] = {"pipe", "data", "expert", "sequence", "tensor"};
  return kNames[static_cast<size_t>(axis)];
}

MeshAxis parse_mesh_axis(const std::string& name) {
  for (const MeshAxis axis : kAxes) {
    if (name == name_of(axis)) return axis;
  }
  throw ConfigError(cat("mesh axis: expected pipe, data, expert, sequence or tensor, found '", name, "'"));
}

MeshLayout::MeshLayout(const MeshSizes& sizes) {
  sizes_[MeshAxis::kPipe] = sizes.pipe;
  sizes_[MeshAxis::kData] = sizes.data;
  sizes_[MeshAxis::kExpert] = sizes.expert;
  sizes_[MeshAxis::kSequence] = sizes.sequence;
  sizes_[MeshAxis::kTensor] = sizes.tensor;
  for (const MeshAxis axis : kAxes) {
    require<ConfigError>(sizes_[axis] >= 1, "mesh: expected the size of axis ", name_of(axis),
                         " to be at least 1, found ", sizes_[axis]);
  }
}

MeshLayout MeshLayout::fill_data(MeshSizes sizes, int world_size) {
  sizes.data = 1;
  const MeshLayout others(sizes);
  require<ConfigError>(world_size >= 1 && world_size % others.world_size() == 0,
                       "mesh: ", lazy([&] { return others.text(); }), " takes ", others.world_size(),
                       " ranks, which does not divide the ", world_size, " ranks of the job. ",
                       "Change the sizes of the axes or the number of ranks");
  sizes.data = world_size / others.world_size();
  return MeshLayout(sizes);
}

int MeshLayout::world_size() const {
  int product = 1;
  for (const MeshAxis axis : kAxes) product *= sizes_[axis];
  return product;
}

MeshIndex MeshLayout::coordinates(int rank) const {
  require(rank >= 0 && rank < world_size(), "mesh: expected a rank in [0, ", world_size(), "), found ", rank);
  MeshIndex index;
  for (auto axis = kAxes.rbegin(); axis != kAxes.rend(); ++axis) {
    index[*axis] = rank % sizes_[*axis];
    rank /= sizes_[*axis];
  }
  return index;
}

int MeshLayout::rank_at(const MeshIndex& coordinates) const {
  int rank = 0;
  for (const MeshAxis axis : kAxes) {
    require(coordinates[axis] >= 0 && coordinates[axis] < sizes_[axis], "mesh: expected a coordinate in [0, ",
            sizes_[axis], ") along ", name_of(axis), ", found ", coordinates[axis]);
    rank = rank * sizes_[axis] + coordinates[axis];
  }
  return rank;
}

std::vector<std::vector<int>> MeshLayout::groups(const std::vector<MeshAxis>& axes) const {
  std::vector<std::vector<int>> all;
  for (int rank = 0; rank < world_size(); ++rank) {
    const MeshIndex index = coordinates(rank);
    const bool first = std::all_of(axes.begin(), axes.end(), [&](MeshAxis axis) { return index[axis] == 0; });
    if (first) all.push_back(group_of(rank, axes));
  }
  return all;
}

std::vector<int> MeshLayout::group_of(int rank, const std::vector<MeshAxis>& axes) const {
  const MeshIndex own = coordinates(rank);
  std::vector<int> members;
  for (int other = 0; other < world_size(); ++other) {
    const MeshIndex index = coordinates(other);
    const bool same = std::all_of(kAxes.begin(), kAxes.end(),
                                  [&](MeshAxis axis) { return index[axis] == own[axis] || contains(axes, axis); });
    if (same) members.push_back(other);
  }
  return members;
}

std::string MeshLayout::group_name(const std::vector<MeshAxis>& axes) const {
  std::string name;
  for (const MeshAxis axis : kAxes) {
    if (contains(axes, axis)) name += cat(name.empty() ? "" : "+", name_of(axis));
  }
  return name;
}

std::string MeshLayout::text() const {
  std::string text;
  for (const MeshAxis axis : kAxes) {
    if (sizes_[axis] > 1) text += cat(text.empty() ? "" : " x ", name_of(axis), " ", sizes_[axis]);
  }
  return text.empty() ? "data 1" : text;
}

}  // namespace ds::comm
