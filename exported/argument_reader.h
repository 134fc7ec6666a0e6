// Arguments of nodes: from JSON to what an operator's schema declares.
#pragma once

#include <ATen/core/jit_type.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "exported/program.h"

namespace ds::exported {

// Access to the graph around an argument that is read.
struct ArgumentContext {
  std::function<int(std::string_view name)> slot;            // throws IoError for a value that is not there
  std::function<size_t(const nlohmann::json& graph)> graph;  // reads one and returns its index
  std::string device_type;  // of the export: tensors on it are made on the model's device
};

// Returns the argument; `type`: as the schema declares it, null: any. Where the schema has a float, a whole number
// becomes one; where it has a tensor, a number becomes a wrapped one; where it has a list of numbers, one number
// becomes a list. Throws IoError for a kind that is not known.
Argument read_argument(const nlohmann::json& argument, const ArgumentContext& context, const c10::Type* type);

}  // namespace ds::exported
