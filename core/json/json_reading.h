// How a JSON document is read into structs: strictness, values for "auto", and where mistakes go. Torch-free.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "core/json/hjson.h"
#include "core/json/json_problems.h"

namespace ds {

// What becomes of a key that nobody has named.
enum class UnknownKeys {
  kRefuse,       // an error
  kWarn,         // a warning; an error when it is nearly a known key
  kRefuseNearly  // nearly known keys are errors; of others only those whose meaning is known are told
};

// What a document is read with. Refers to both, which outlive it.
struct JsonReading {
  struct AutoValue {
    nlohmann::ordered_json value;
    std::string source;
  };
  const HjsonDocument& document;
  JsonProblems& problems;
  bool strict = false;  // every unknown key is an error
  // The value of an "auto" at a JSON pointer; nothing: the default.
  std::function<std::optional<AutoValue>(const std::string& pointer)> auto_value;
  // What a key at a JSON pointer that no field has, and that is near none, is meant for: "write ..."; empty: not known.
  std::function<std::string(const std::string& pointer)> meaning;
  // Told what became of each "auto".
  std::function<void(const std::string& pointer, const nlohmann::ordered_json& value, const std::string& source)>
      on_auto;
};

}  // namespace ds
