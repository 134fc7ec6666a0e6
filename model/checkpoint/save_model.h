// Writing weights of the model to one file: all of them, or chosen ones such as adapters.
#pragma once

#include <optional>
#include <string>

#include "dsengine/checkpoint.h"
#include "model/state/model_state.h"

namespace ds::engine {

// Writes parameters, under all their names, and buffers to a safetensors file, by the first rank with this part of the
// model. Makes its folder. `from`: full values by name that the file gets in the place of the model's parameters, and
// of the buffers that it names; the first rank's count, other ranks give any. Collective; when the file cannot be
// written, every rank throws (that rank the cause, the others IoError) and an older file is left as it was. That holds
// for a `from` that does not fit, too, whose cause is a UsageError.
void save_model(const ModelState& state, const std::string& path, bool with_frozen,
                const std::optional<StateDict>& from = std::nullopt);

// Writes chosen parameters and buffers, by the first rank with this part of the model, as save_model() does. Gathers
// the buckets alone that have some of them. Throws UsageError, on all ranks, for a name or pattern that means none.
void save_chosen(const ModelState& state, const std::string& path, const SaveWeightsOptions& options);

// Lets the first rank with this part of the model write whole_masters(), each tied weight under all its names, and
// buffers to a file for torch::load(module, path); 16-bit buffers become float32. That rank holds one copy of the
// weights on the host meanwhile. Makes the folder. Collective; when the file cannot be written, every rank throws (that
// rank the cause, the others IoError) and an older file is left as it was.
void save_fp32_model(const ModelState& state, const std::string& path);

}  // namespace ds::engine
