#include "engine/setup/parameter_groups.h"

#include "core/check.h"
#include "core/name_pattern.h"

namespace ds::engine {

std::vector<int> assign_groups(const std::vector<zero::Parameter>& parameters,
                               const std::vector<ParameterGroup>& groups, bool part_of_model) {
  std::vector<int> result(parameters.size(), 0);
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const std::string& pattern : groups[g].parameters) {
      const NamePattern wanted = NamePattern::stars(pattern);
      bool found = false;
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (!wanted.matches(parameters[i].name)) continue;
        found = true;
        const int group = static_cast<int>(g) + 1;
        require(result[i] == 0 || result[i] == group, "parameter_groups: parameter ", parameters[i].name,
                " is in group ", result[i] - 1, " and, by \"", pattern, "\", in group ", g, "; expected one group");
        result[i] = group;
      }
      require(found || part_of_model, "parameter_groups[", g, "]: \"", pattern,
              "\" matches no trainable parameter; names look like \"", parameters.front().name, "\"");
    }
  }
  return result;
}

}  // namespace ds::engine
