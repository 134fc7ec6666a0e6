// The functions of numbers that a program computes sizes with, as Python has them.
#pragma once

#include <string>

#include "exported/program.h"

namespace ds::exported {

// Whether a target is such a function, known or not: "_operator.add", "torch.sym_max", "math.floor".
bool is_number_function(const std::string& target);
// Returns the function, null for one that is not known. It throws UsageError for a division by zero.
NumberFunction number_function(const std::string& target);
// Lists the known ones, for a message.
std::string known_number_functions();

}  // namespace ds::exported
