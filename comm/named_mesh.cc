#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>

#include "comm/agreement.h"
#include "comm/mesh_hosts.h"
#include "comm/subgroups.h"
#include "core/check.h"
#include "core/log.h"
#include "dsengine/device_mesh.h"

namespace ds::comm {

// The grid that all parts of a mesh share.
struct NamedMesh::Grid {
  std::shared_ptr<Communicator> world;
  GridShape shape;
  std::vector<std::string> names;
  std::vector<int> hosts;  // a number for each rank
  std::map<std::vector<size_t>, std::shared_ptr<Communicator>> groups;
  std::shared_ptr<DeviceMesh> device_mesh;

  size_t axis_of(const std::string& name) const;
  std::vector<size_t> axes_of(const std::vector<std::string>& some) const;
  std::shared_ptr<Communicator> group(const std::vector<size_t>& axes);
};

namespace {

std::string list_of(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += cat(text.empty() ? "" : ", ", name);
  return text;
}

std::optional<MeshAxis> meaning_of(const std::string& name) {
  static const std::map<std::string, MeshAxis> kMeanings = {
      {"pp", MeshAxis::kPipe},           {"pipe", MeshAxis::kPipe},     {"dp", MeshAxis::kData},
      {"data", MeshAxis::kData},         {"ddp", MeshAxis::kData},      {"fsdp", MeshAxis::kData},
      {"dp_replicate", MeshAxis::kData}, {"dp_shard", MeshAxis::kData}, {"ep", MeshAxis::kExpert},
      {"expert", MeshAxis::kExpert},     {"cp", MeshAxis::kSequence},   {"sp", MeshAxis::kSequence},
      {"sequence", MeshAxis::kSequence}, {"tp", MeshAxis::kTensor},     {"tensor", MeshAxis::kTensor}};
  const auto found = kMeanings.find(name);
  return found == kMeanings.end() ? std::nullopt : std::optional(found->second);
}

int& size_along(MeshSizes& sizes, MeshAxis axis) {
  switch (axis) {
    case MeshAxis::kPipe:
      return sizes.pipe;
    case MeshAxis::kData:
      return sizes.data;
    case MeshAxis::kExpert:
      return sizes.expert;
    case MeshAxis::kSequence:
      return sizes.sequence;
    case MeshAxis::kTensor:
      break;
  }
  return sizes.tensor;
}

}  // namespace

size_t NamedMesh::Grid::axis_of(const std::string& name) const {
  const auto found = std::find(names.begin(), names.end(), name);
  require<ConfigError>(found != names.end(), "mesh: expected one of the axes ", lazy([&] { return list_of(names); }),
                       ", found '", name, "'");
  return static_cast<size_t>(found - names.begin());
}

std::vector<size_t> NamedMesh::Grid::axes_of(const std::vector<std::string>& some) const {
  std::vector<size_t> axes;
  for (const std::string& name : some) axes.push_back(axis_of(name));
  std::sort(axes.begin(), axes.end());
  axes.erase(std::unique(axes.begin(), axes.end()), axes.end());
  return axes;
}

std::shared_ptr<Communicator> NamedMesh::Grid::group(const std::vector<size_t>& axes) {
  const auto known = groups.find(axes);
  if (known != groups.end()) return known->second;
  std::string name;
  for (const size_t axis : axes) name += cat(name.empty() ? "" : "+", names[axis]);
  const auto lists = shape.groups(axes);
  const auto own = lists.size() == 1 ? world : own_group(*world, lists, name);
  ensure(own != nullptr, "every rank is in one group of each kind");
  groups.emplace(axes, own);
  return own;
}

std::vector<int> NamedMesh::shape() const {
  std::vector<int> sizes;
  for (const size_t axis : grid_->axes_of(names_)) sizes.push_back(grid_->shape.sizes[axis]);
  return sizes;
}

int NamedMesh::size() const {
  int product = 1;
  for (const int size : shape()) product *= size;
  return product;
}

int NamedMesh::size(const std::string& name) const { return part({name}).size(); }

NamedMesh NamedMesh::part(const std::vector<std::string>& names) const {
  require<ConfigError>(!names.empty(), "mesh: expected at least one axis of ", lazy([&] { return list_of(names_); }),
                       ", found none");
  for (const std::string& name : names) {
    require<ConfigError>(std::find(names_.begin(), names_.end(), name) != names_.end(), "mesh: expected one of the ",
                         "axes ", lazy([&] { return list_of(names_); }), ", found '", name, "'");
  }
  std::vector<std::string> in_order;
  for (const size_t axis : grid_->axes_of(names)) in_order.push_back(grid_->names[axis]);
  return NamedMesh(grid_, std::move(in_order));
}

std::optional<NamedMesh> NamedMesh::joined_with(const Communicator& group) const {
  for (size_t axis = 0; axis < grid_->names.size(); ++axis) {
    const std::string& name = grid_->names[axis];
    const bool own = std::find(names_.begin(), names_.end(), name) != names_.end();
    if (own || grid_->group({axis}).get() != &group) continue;
    NamedMesh whole(grid_, grid_->names);
    std::vector<std::string> names = names_;
    names.push_back(name);
    return whole.part(names);
  }
  return std::nullopt;
}

std::shared_ptr<Communicator> NamedMesh::get_group() const { return grid_->group(grid_->axes_of(names_)); }

std::vector<int> NamedMesh::get_coordinate() const {
  const std::vector<int> own = grid_->shape.coordinates(grid_->world->rank());
  std::vector<int> result;
  for (const size_t axis : grid_->axes_of(names_)) result.push_back(own[axis]);
  return result;
}

int NamedMesh::get_local_rank() const {
  const std::vector<int> sizes = shape();
  const std::vector<int> own = get_coordinate();
  int rank = 0;
  for (size_t axis = 0; axis < sizes.size(); ++axis) rank = rank * sizes[axis] + own[axis];
  return rank;
}

std::shared_ptr<DeviceMesh> NamedMesh::device_mesh() const {
  require<ConfigError>(names_ == grid_->names, "mesh: the engine trains on all axes, ",
                       lazy([&] { return list_of(grid_->names); }), "; found a part of them, ",
                       lazy([&] { return list_of(names_); }));
  if (grid_->device_mesh) return grid_->device_mesh;
  MeshSizes sizes;
  std::optional<MeshAxis> last;
  for (size_t i = 0; i < names_.size(); ++i) {
    const std::optional<MeshAxis> axis = meaning_of(names_[i]);
    require<ConfigError>(axis.has_value(),
                         "mesh: the engine knows the axes pp, dp, ep, cp and tp (pipe, data, expert, ",
                         "sequence, tensor), found '", names_[i], "'");
    if (grid_->shape.sizes[i] == 1) continue;
    require<ConfigError>(!last || *last <= *axis, "mesh: the engine wants axes in the order pipe, data, expert, ",
                         "sequence, tensor, from the outermost, found ", lazy([&] { return list_of(names_); }));
    size_along(sizes, *axis) *= grid_->shape.sizes[i];
    last = axis;
  }
  grid_->device_mesh = std::make_shared<DeviceMesh>(grid_->world, MeshLayout(sizes));
  return grid_->device_mesh;
}

std::string NamedMesh::text() const {
  if (names_ == grid_->names) return grid_text(grid_->shape, names_, grid_->hosts);
  std::string text;
  const std::vector<int> sizes = shape();
  for (size_t i = 0; i < names_.size(); ++i) text += cat(text.empty() ? "" : " x ", names_[i], " ", sizes[i]);
  return text;
}

NamedMesh init_device_mesh(std::shared_ptr<Communicator> ranks, const std::vector<int>& shape,
                           const std::vector<std::string>& names, c10::Device device) {
  require(ranks != nullptr, "init_device_mesh: expected a group of ranks, found none");
  require<ConfigError>(!names.empty() && shape.size() == names.size(), "init_device_mesh: expected a name for each of ",
                       shape.size(), " sizes, found ", names.size());
  require<ConfigError>(std::set<std::string>(names.begin(), names.end()).size() == names.size(),
                       "init_device_mesh: a name comes twice in ", lazy([&] { return list_of(names); }));
  for (size_t i = 0; i < shape.size(); ++i) {
    require<ConfigError>(shape[i] >= 1 && shape[i] <= ranks->size(), "init_device_mesh: axis ", names[i],
                         ": expected a size from 1 to ", ranks->size(), ", found ", shape[i]);
  }
  GridShape grid_shape{.sizes = shape};
  int64_t product = 1;
  for (const int size : shape) product = std::min<int64_t>(product * size, int64_t{1} << 40);
  require<ConfigError>(product == ranks->size(), "init_device_mesh: the sizes multiply to ", product,
                       ", but there are ", ranks->size(), " ranks; change a size, or the number of ranks");
  auto grid = std::make_shared<NamedMesh::Grid>();
  grid->world = std::move(ranks);
  grid->shape = std::move(grid_shape);
  grid->names = names;
  grid->hosts = hosts_of(*grid->world, device);
  const std::string problem = innermost_problem(grid->shape, names, grid->hosts);
  if (!problem.empty() && grid->world->rank() == 0) log::warning(problem);
  for (size_t axis = 0; axis < names.size(); ++axis) grid->group({axis});
  return NamedMesh(std::move(grid), names);
}

}  // namespace ds::comm
