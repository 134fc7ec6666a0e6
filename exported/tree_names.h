// Names of the leaves of what Python calls a pytree: nested lists, tuples, dicts and dataclasses.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace ds::exported {

// Names of the leaves of forward's arguments: `spec` is the text of a tuple of (args, kwargs); `arguments` the names of
// the positional ones. Empty: the text does not say.
std::vector<std::string> input_names(const std::string& spec, const std::vector<std::string>& arguments);
// Names of the leaves of what forward returns, joined by dots: "loss", "past.0", "0" of a lone tensor.
std::vector<std::string> output_names(const std::string& spec);

}  // namespace ds::exported
