// Which parameter is which, where a file has only the order of parameters and their shapes: torch's optimizers number
// parameters by group, and a state dict names all of them, frozen ones too.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ds::checkpoint {

using Sizes = std::vector<int64_t>;

struct NamedSizes {
  std::string name;
  Sizes sizes;
};

// `module`: names and sizes in the order of the module. groups[g]: sizes of the parameters of group g, in the order of
// the module too; nothing where they are unknown. Returns for each of them its index in `module`. What is left over is
// frozen. Throws IoError beginning with `where` when there is no such assignment, or more than one.
std::vector<std::vector<size_t>> match_parameters(const std::vector<NamedSizes>& module,
                                                  const std::vector<std::vector<std::optional<Sizes>>>& groups,
                                                  const std::string& where);

}  // namespace ds::checkpoint
