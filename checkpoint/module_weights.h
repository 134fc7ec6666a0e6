// How the weights of a checkpoint meet the parameters of a module. See load_module() of dsengine/checkpoint.h.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "dsengine/checkpoint.h"

namespace ds::checkpoint {

// Returns the weight of a checkpoint that a parameter takes. `names`: all names of the parameter (a tied one has
// several), the first being the one it is stored under. Empty: the checkpoint has none of them.
std::string weight_for(const Source& source, const std::vector<std::string>& names);

// Adds weights of a checkpoint that are stored under further ones of a parameter's names, where their values are the
// same; which of two that differ is right cannot be known.
void add_stored_names(Source& source, const std::vector<std::string>& names, const std::vector<int64_t>& sizes,
                      std::map<std::string, std::vector<int64_t>>& wanted);

// What a module and the weights and buffers of a source do not have in common, by paths.
struct Difference {
  std::vector<std::string> missing;  // in the source
  std::vector<std::string> unused;   // that the model does not have
  bool empty() const { return missing.empty() && unused.empty(); }
  // The difference in words.
  std::string text() const;
};
// `wanted`: paths -> shape, of the module.
Difference difference(const Source& source, const std::map<std::string, std::vector<int64_t>>& wanted);
// Throws UsageError for a wanted path (that the source has) of another shape, naming both shapes.
void require_shapes(const Source& source, const std::map<std::string, std::vector<int64_t>>& wanted);

}  // namespace ds::checkpoint
