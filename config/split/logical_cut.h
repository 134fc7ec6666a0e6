// The cut of a weight that layer_specs view in another shape: [3, -1], [[q, k, v], -1], [experts, -1, in]. Pure,
// torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/split/partition_config.h"

namespace ds::engine {

struct LogicalCut {
  int64_t dim = 0;
  std::vector<int64_t> blocks;  // empty: one
  int64_t grain = 1;
};

// `path`: of the entry, for messages. Throws ConfigError when a weight of `sizes`, a parameter `name`, is no such
// shape.
LogicalCut logical_cut(const config::LayerPartition& spec, const std::vector<int64_t>& sizes, const std::string& name,
                       const std::string& path);

}  // namespace ds::engine
