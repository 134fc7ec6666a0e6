// What an "auto" of the file becomes.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "core/json/json_fields.h"
#include "dsengine/config.h"

namespace ds::engine::config {

// The value for the "auto" at a JSON pointer: what the program gave, else one computed from the model or from another
// key of `root`; nothing: the default.
std::optional<JsonReading::AutoValue> resolve_auto(const std::string& pointer, const AutoValues& values,
                                                   const nlohmann::ordered_json& root);

}  // namespace ds::engine::config
