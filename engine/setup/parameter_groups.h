// Which parameters belong to the program's groups.
#pragma once

#include <vector>

#include "dsengine/initialize.h"
#include "zero/parameter_bucket.h"

namespace ds::engine {

// The group of each trainable parameter: 0 = the config's values, i + 1 = groups[i]. A pattern is a dotted name in
// which
// '*' stands for any text. Throws UsageError when a pattern matches nothing or two groups
// claim a parameter. `part_of_model`: other ranks have other parameters, so a pattern may match none here.
std::vector<int> assign_groups(const std::vector<zero::Parameter>& parameters,
                               const std::vector<ParameterGroup>& groups, bool part_of_model);

}  // namespace ds::engine
