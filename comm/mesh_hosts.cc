#include "comm/mesh_hosts.h"

#include <map>
#include <optional>
#include <utility>

#include "core/text.h"

namespace ds::comm {
namespace {

std::optional<size_t> innermost(const GridShape& shape) {
  for (size_t axis = shape.sizes.size(); axis > 0; --axis) {
    if (shape.sizes[axis - 1] > 1) return axis - 1;
  }
  return std::nullopt;
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += cat(text.empty() ? "" : ", ", name);
  return text;
}

}  // namespace

int GridShape::ranks() const {
  int product = 1;
  for (const int size : sizes) product *= size;
  return product;
}

std::vector<int> GridShape::coordinates(int rank) const {
  std::vector<int> result(sizes.size());
  for (size_t axis = sizes.size(); axis > 0; --axis) {
    result[axis - 1] = rank % sizes[axis - 1];
    rank /= sizes[axis - 1];
  }
  return result;
}

std::vector<std::vector<int>> GridShape::groups(const std::vector<size_t>& axes) const {
  // A group's ranks are alike but for these axes.
  std::map<std::vector<int>, size_t> places;
  std::vector<std::vector<int>> result;
  for (int rank = 0; rank < ranks(); ++rank) {
    std::vector<int> key = coordinates(rank);
    for (const size_t axis : axes) key[axis] = 0;
    const auto [place, is_new] = places.try_emplace(std::move(key), result.size());
    if (is_new) result.emplace_back();
    result[place->second].push_back(rank);
  }
  return result;
}

bool inside_hosts(const GridShape& shape, size_t axis, const std::vector<int>& hosts) {
  for (const std::vector<int>& group : shape.groups({axis})) {
    for (const int rank : group) {
      if (hosts[static_cast<size_t>(rank)] != hosts[static_cast<size_t>(group.front())]) return false;
    }
  }
  return true;
}

std::string crossing_text(const GridShape& shape, size_t axis, const std::vector<int>& hosts,
                          const std::vector<std::string>& names) {
  for (const std::vector<int>& group : shape.groups({axis})) {
    for (size_t i = 1; i < group.size(); ++i) {
      const auto a = static_cast<size_t>(group[i - 1]);
      const auto b = static_cast<size_t>(group[i]);
      if (hosts[a] != hosts[b]) return cat("ranks ", a, " (host ", names[a], ") and ", b, " (host ", names[b], ")");
    }
  }
  return {};
}

std::string grid_text(const GridShape& shape, const std::vector<std::string>& names, const std::vector<int>& hosts) {
  std::string text;
  std::vector<std::string> inside;
  std::vector<std::string> between;
  for (size_t axis = 0; axis < names.size(); ++axis) {
    text += cat(text.empty() ? "" : " x ", names[axis], " ", shape.sizes[axis]);
    if (shape.sizes[axis] > 1) (inside_hosts(shape, axis, hosts) ? inside : between).push_back(names[axis]);
  }
  if (between.empty()) return inside.empty() ? text : cat(text, "; on one host");
  if (inside.empty()) return cat(text, "; ", joined(between), " between hosts");
  return cat(text, "; ", joined(inside), " inside hosts, ", joined(between), " between them");
}

std::string innermost_problem(const GridShape& shape, const std::vector<std::string>& names,
                              const std::vector<int>& hosts) {
  const std::optional<size_t> axis = innermost(shape);
  if (!axis || inside_hosts(shape, *axis, hosts)) return {};
  return cat("mesh ", grid_text(shape, names, hosts), ": axis ", names[*axis],
             ", the innermost, sends most often, and ",
             "leaves its host; expected a size that divides the ranks of a host, found ", shape.sizes[*axis],
             ". Make it smaller, or put an axis that sends less there");
}

}  // namespace ds::comm
