// The value that takes the place of an "auto" of the file.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "core/json/json_types.h"
#include "dsengine/config.h"

namespace ds::engine::config {

// ResolvedAuto::source of what ParseOptions::assumed_values gave.
inline constexpr const char* kAssumed = "assumed";

// The value for the "auto" at a JSON pointer: what the program gave, else one computed from the model or from another
// key of `root`, else an assumed one; nothing: the default.
std::optional<JsonReading::AutoValue> resolve_auto(const std::string& pointer, const ParseOptions& options,
                                                   const nlohmann::ordered_json& root);

}  // namespace ds::engine::config
