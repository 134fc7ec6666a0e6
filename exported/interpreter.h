// Runs an exported program.
#pragma once

#include <ATen/core/ivalue.h>

#include <vector>

#include "exported/program.h"

namespace ds::exported {

// Calls the operators of the main graph through the dispatcher, and returns the outputs of Python's forward. `inputs`:
// one for each of Program::inputs, checked. `training`: the mode. Buffers that the program returns changed are written.
// Throws what operators throw as UsageError that names the node and Python's line; errors of dsengine that are no
// UsageError, and of memory, keep their type.
std::vector<c10::IValue> run(Program& program, const std::vector<c10::IValue>& inputs, bool training);

}  // namespace ds::exported
