// Parses the JSON of a program without what no reader looks at, which is nearly half of it: strides, devices and
// layouts of the values that nodes make, and notes on the functions of Python that made the nodes.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace ds::exported {

// Keeps "dtype" and "sizes" of the values of a graph, and "nn_module_stack" and "stack_trace" of the metadata of a
// node; all else is as in the text. Throws nlohmann's exceptions.
nlohmann::json parse_program(const std::string& text);

}  // namespace ds::exported
