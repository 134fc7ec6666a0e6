// Brings inputs, given by name or by position, into the order of an exported program, and checks them, the mode and the
// dtype before it runs; checks that a second file, for eval(), is one of the same model.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <optional>
#include <string>
#include <vector>

#include "dsengine/exported_model.h"
#include "exported/program.h"

namespace ds::exported {

// Returns the inputs in the program's order; baked ones that are left out get their values. Throws UsageError.
std::vector<c10::IValue> by_position(const Program& program, std::vector<c10::IValue> inputs);
std::vector<c10::IValue> by_name(const Program& program, const ExportedInputs& inputs);

// Throws UsageError where the program cannot run in a mode. `has_eval`: a second file serves eval().
void require_mode(const Program& program, bool training, bool has_eval);

// Throws ConfigError as ExportedModule::require_dtype().
void require_dtype(const Program& program, at::ScalarType dtype, const std::string& key);

// Throws UsageError, naming input and dimension, where the inputs are not what the program was exported for.
void check_inputs(const Program& program, const std::vector<c10::IValue>& inputs);

// Throws IoError where the program cannot be the one for eval() of a model whose other program is `train`.
void require_eval_of(const Program& train, const Program& eval);

// Throws IoError where a tensor of the program for eval() is not that of the first file under its name. `first`: the
// sizes there; none: the first program has no such tensor.
void require_same_tensor(const std::string& name, at::IntArrayRef sizes, std::optional<at::IntArrayRef> first);

}  // namespace ds::exported
