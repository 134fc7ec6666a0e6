// The description of a struct's fields in JSON (names, ranges, enumerators), and how a document is read into them:
// strictness, values for "auto", and where mistakes go. Torch-free.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/json/hjson.h"
#include "core/json/json_problems.h"

namespace ds {

// The value in a document that leaves a field to the program, or to its default.
inline constexpr const char* kJsonAuto = "auto";
// What Python writes for an infinite number. JSON has none: it is read as this text.
inline constexpr const char* kJsonInfinity = "Infinity";

// The name of a field, and another one that is accepted in its place.
struct JsonKey {
  JsonKey(const char* key) : name(key) {}             // NOLINT(google-explicit-constructor)
  JsonKey(std::string key) : name(std::move(key)) {}  // NOLINT(google-explicit-constructor)
  JsonKey(const char* key, const char* other_spelling) : name(key), alias(other_spelling) {}
  std::string name;
  std::string alias;  // empty: none
};

// Numbers within limits; a limit that is absent does not limit.
struct JsonRange {
  std::optional<double> minimum, maximum;
  bool open_minimum = false, open_maximum = false;
  bool booleans = true;  // whether true and false pass for 1 and 0

  bool accepts(double value) const;
  std::string in_words() const;
};
inline JsonRange at_least(double minimum) { return {.minimum = minimum}; }
inline JsonRange above(double minimum) { return {.minimum = minimum, .open_minimum = true}; }
inline JsonRange between(double minimum, double maximum) { return {.minimum = minimum, .maximum = maximum}; }
inline JsonRange inside(double minimum, double maximum) {
  return {.minimum = minimum, .maximum = maximum, .open_minimum = true, .open_maximum = true};
}

// Enumerators with the names they have in JSON.
template <class E>
using EnumNames = std::vector<std::pair<std::string, E>>;

// The name of an enumerator; nothing for one that has none.
template <class E>
std::optional<std::string> enum_name(const std::vector<std::pair<std::string, E>>& names, E wanted) {
  for (const auto& [name, value] : names) {
    if (value == wanted) return name;
  }
  return std::nullopt;
}

template <class E>
std::vector<std::string> enum_names(const std::vector<std::pair<std::string, E>>& names) {
  std::vector<std::string> all;
  for (const auto& entry : names) all.push_back(entry.first);
  return all;
}

// The treatment of a key that no field has named.
enum class UnknownKeys {
  kRefuse,         // an error
  kRefuseAndList,  // an error that lists the known keys, where neither a near one nor a meaning is known
  kWarn,           // a warning; an error when it is nearly a known key
  kRefuseNearly    // nearly known keys are errors; of others only those whose meaning is known are told
};

// The settings that a document is read with. Holds references to the document and its problems, which outlive it.
struct JsonReading {
  struct AutoValue {
    nlohmann::ordered_json value;
    std::string source;
  };
  const HjsonDocument& document;
  JsonProblems& problems;
  bool strict = false;  // every unknown key is an error
  // Returns the value of an "auto" at a JSON pointer; nothing: the default.
  std::function<std::optional<AutoValue>(const std::string& pointer)> auto_value;
  // Says what a key at a JSON pointer that no field has, and that is near none, is meant for: "write ..."; empty: not
  // known.
  std::function<std::string(const std::string& pointer)> meaning;
  // Called with the value that each "auto" got.
  std::function<void(const std::string& pointer, const nlohmann::ordered_json& value, const std::string& source)>
      on_auto;
};

}  // namespace ds
