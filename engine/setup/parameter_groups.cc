#include "engine/setup/parameter_groups.h"

#include "core/check.h"

namespace ds::engine {
namespace {

bool matches(const std::string& pattern, const std::string& name) {
  if (pattern.ends_with('*')) return name.starts_with(pattern.substr(0, pattern.size() - 1));
  if (pattern.starts_with('*')) return name.ends_with(pattern.substr(1));
  return pattern == name;
}

}  // namespace

std::vector<int> assign_groups(const std::vector<zero::Parameter>& parameters,
                               const std::vector<ParameterGroup>& groups, bool part_of_model) {
  std::vector<int> result(parameters.size(), 0);
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const std::string& pattern : groups[g].parameters) {
      bool found = false;
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (!matches(pattern, parameters[i].name)) continue;
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
