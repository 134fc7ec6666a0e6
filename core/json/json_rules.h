// The spellings of a JSON field's name, and the range of a number. Torch-free.
#pragma once

#include <optional>
#include <string>
#include <utility>

namespace ds {

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

}  // namespace ds
