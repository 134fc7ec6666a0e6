// JSON of files and messages, read the same under every locale. Torch-free.
#pragma once

#include <nlohmann/json.hpp>
#include <utility>

#include "core/classic_scope.h"

namespace ds {

// Json::parse(text, ...) of nlohmann::json or ordered_json, with its further arguments (callback, allow_exceptions).
template <class Json, class Text, class... Arguments>
Json parse_json(const Text& text, Arguments&&... arguments) {
  const ClassicScope scope;
  return Json::parse(text, std::forward<Arguments>(arguments)...);
}

}  // namespace ds
