// Reads a program of an archive into what the interpreter runs.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

#include "dsengine/exported_model.h"
#include "exported/archive.h"
#include "exported/program.h"

namespace ds::exported {

// Returns the tensor that the program has under a name. `stored`: what the file says of it.
using TensorOfName =
    std::function<at::Tensor(LiftedTensor::Kind kind, const std::string& name, const StoredTensor& stored)>;

// `json`: Archive::program(). Throws IoError, naming file, node and Python's line, for what cannot be run.
std::unique_ptr<Program> read_program(const Archive& archive, const nlohmann::json& json,
                                      const ExportedOptions& options, const TensorOfName& tensor);

}  // namespace ds::exported
